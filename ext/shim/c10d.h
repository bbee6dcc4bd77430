// A process group, as the shim holds one: what `c10d.cpp` runs and `c10d.cpp` or `nccl.cpp` makes.
#pragma once
#include "shim.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <mutex>

using Store = c10::intrusive_ptr<c10d::Store>;

struct Group {
  c10::intrusive_ptr<c10d::Backend> backend;
  // Breaks the connections.
  std::function<void()> abort;
  // The device of a barrier.
  c10::Device device;
};
