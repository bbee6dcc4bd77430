// What the files of the shim share: the shape of a failure, and the guard that turns exceptions into one.
#pragma once
#include <ATen/core/Tensor.h>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

// The C names are those of `src/ffi.rs`, which declares each function again: keep the two alike.
#define FT_API extern "C" __attribute__((visibility("hidden")))

// Handles of `torch-sys` are `at::Tensor*`, so a tensor crosses as it is; null stands for an undefined one.
using Tensor = at::Tensor;
using List = std::vector<at::Tensor>;
using DropFn = void (*)(void*);

enum Status : int { OK = 0, FAILED = 1, TIMED_OUT = 2 };

struct Failure {
  char* message;
  void* payload;
};

// Something of Rust's, dropped there.
struct Owned {
  std::atomic<void*> state;
  DropFn drop;
  Owned(void* state, DropFn drop) : state(state), drop(drop) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    if (auto left = state.load()) drop(left);
  }
};

// The error of a Rust callback on its way through the engine. Copies of the exception share the payload, which the
// first to catch it takes.
struct CallbackError : std::runtime_error {
  std::shared_ptr<Owned> payload;
  CallbackError(const std::string& message, std::shared_ptr<Owned> payload)
      : std::runtime_error(message), payload(std::move(payload)) {}
};

// Where a Rust callback leaves its error before it returns.
struct Sink {
  std::string message;
  std::shared_ptr<Owned> payload;
};

// Runs a callback of Rust's and throws what it left.
template <class Call>
void call_rust(Call&& call) {
  Sink sink;
  if (call(&sink) != OK) throw CallbackError(sink.message, sink.payload);
}

char* copy_string(const std::string& text);
int fail(Failure* failure, const std::string& message);

template <class Body>
int guarded(Failure* failure, Body&& body) noexcept {
  try {
    body();
    return OK;
  } catch (const CallbackError& error) {
    if (error.payload) failure->payload = error.payload->state.exchange(nullptr);
    return fail(failure, error.what());
  } catch (const c10::Error& error) {
    return fail(failure, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(failure, error.what());
  } catch (...) {
    return fail(failure, "an exception of unknown type");
  }
}
