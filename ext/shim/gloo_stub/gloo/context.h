// Declarations only: libtorch has Gloo inside but ships c10d's headers without Gloo's. These name just what c10d's header
// mentions; the definitions are in libtorch_cpu.so.
#pragma once
#include <chrono>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
} // namespace gloo
