// Autograd functions and hooks whose bodies are Rust's, and the backward pass.
#include "shim.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Context;
using FunctionFn = int (*)(void* state, Context* context, const List* inputs, List* outputs, Sink* sink);
using HookFn = int (*)(void* state, const Tensor* tensor, Tensor** output, Sink* sink);

namespace {

// A Rust function, kept by its node among the saved data.
struct Function : torch::CustomClassHolder {
  Owned state;
  FunctionFn forward, backward;
  size_t inputs;
  Function(void* state, DropFn drop, FunctionFn forward, FunctionFn backward, size_t inputs)
      : state(state, drop), forward(forward), backward(backward), inputs(inputs) {}
};

const char* const kFunction = "function";

} // namespace

struct Context {
  AutogradContext* node;
  // Which inputs require gradients, in a forward; null in a backward, where the engine knows.
  const std::vector<bool>* require_grad;
  size_t inputs;
  variable_list save, non_differentiable;
};

namespace {

// `Function<T>` hides how nodes are held, which differs between versions of libtorch.
struct Bridge : torch::autograd::Function<Bridge> {
  static variable_list forward(
      AutogradContext* node, at::TensorList inputs, c10::intrusive_ptr<::Function> function, bool grad_enabled) {
    std::vector<bool> require_grad;
    for (const auto& input : inputs) require_grad.push_back(grad_enabled && input.requires_grad());
    node->saved_data[kFunction] = c10::IValue::make_capsule(function);
    node->set_materialize_grads(false);
    Context context{node, &require_grad, inputs.size(), {}, {}};
    variable_list input_list = inputs.vec(), outputs;
    call_rust([&](Sink* sink) {
      return function->forward(function->state.state, &context, &input_list, &outputs, sink);
    });
    for (const auto& output : outputs) {
      TORCH_CHECK(output.defined(), "forward gave an undefined tensor");
      if (!output.is_floating_point() && !output.is_complex()) context.non_differentiable.push_back(output);
    }
    node->save_for_backward(std::move(context.save));
    node->mark_non_differentiable(context.non_differentiable);
    return outputs;
  }

  static variable_list backward(AutogradContext* node, variable_list grads) {
    auto capsule = node->saved_data[kFunction].toCapsule();
    auto function = static_cast<::Function*>(capsule.get());
    Context context{node, nullptr, function->inputs, {}, {}};
    variable_list inputs;
    call_rust([&](Sink* sink) { return function->backward(function->state.state, &context, &grads, &inputs, sink); });
    // The arguments of `forward` after the tensors have no gradients.
    inputs.resize(function->inputs + 2);
    return inputs;
  }
};

struct AccumulatedHook : torch::autograd::PostAccumulateGradHook {
  Owned state;
  HookFn call;
  AccumulatedHook(void* state, DropFn drop, HookFn call) : state(state, drop), call(call) {}
  void operator()(const Tensor& tensor) override {
    call_rust([&](Sink* sink) { return call(state.state, &tensor, nullptr, sink); });
  }
};

} // namespace

FT_API int ft_function_apply(
    void* state, DropFn drop, FunctionFn forward, FunctionFn backward, const List* inputs, List* outputs,
    Failure* failure) {
  return guarded(failure, [&] {
    auto function = c10::make_intrusive<::Function>(state, drop, forward, backward, inputs->size());
    for (const auto& input : *inputs) TORCH_CHECK(input.defined(), "an input is an undefined tensor");
    *outputs = Bridge::apply(at::TensorList(*inputs), function, at::GradMode::is_enabled());
  });
}

FT_API void ft_context_save(Context* context, const Tensor* tensor) {
  context->save.push_back(*tensor);
}

FT_API int ft_context_saved(Context* context, List* list, Failure* failure) {
  return guarded(failure, [&] {
    TORCH_CHECK(!context->require_grad, "saved tensors are for the backward; forward has them at hand");
    *list = context->node->get_saved_variables();
  });
}

FT_API bool ft_context_needs_input_grad(Context* context, size_t index) {
  if (index >= context->inputs) return false;
  return context->require_grad ? (*context->require_grad)[index] : context->node->needs_input_grad(index);
}

FT_API void ft_context_mark_non_differentiable(Context* context, const Tensor* tensor) {
  context->non_differentiable.push_back(*tensor);
}

FT_API void ft_context_set_materialize_grads(Context* context, bool value) {
  context->node->set_materialize_grads(value);
}

FT_API int ft_backward(const List* outputs, const List* grads, bool retain_graph, Failure* failure) {
  return guarded(failure, [&] { torch::autograd::backward(*outputs, *grads, retain_graph, /*create_graph=*/false); });
}

FT_API int ft_grad(
    const List* outputs, const List* inputs, const List* grad_outputs, bool retain_graph, bool create_graph,
    List* grads, Failure* failure) {
  return guarded(failure, [&] {
    *grads =
        torch::autograd::grad(*outputs, *inputs, *grad_outputs, retain_graph, create_graph, /*allow_unused=*/true);
  });
}

FT_API int ft_set_gradient(const Tensor* tensor, const Tensor* gradient, Failure* failure) {
  return guarded(failure, [&] {
    TORCH_CHECK(tensor->defined() && tensor->is_leaf(), "only a leaf keeps a gradient");
    if (gradient) {
      TORCH_CHECK(
          gradient->defined() && gradient->sizes() == tensor->sizes() && gradient->dtype() == tensor->dtype() &&
              gradient->device() == tensor->device(),
          "the gradient of ", tensor->toString(), tensor->sizes(), " must be of the same shape, dtype and device");
    }
    tensor->mutable_grad() = gradient ? *gradient : Tensor();
  });
}

FT_API bool ft_grad_mode(bool enabled) {
  bool before = at::GradMode::is_enabled();
  at::GradMode::set_enabled(enabled);
  return before;
}

FT_API bool ft_grad_mode_enabled() {
  return at::GradMode::is_enabled();
}

FT_API int ft_hook_gradient(
    const Tensor* tensor, void* state, DropFn drop, HookFn call, uint32_t* index, Failure* failure) {
  return guarded(failure, [&] {
    auto owned = std::make_shared<Owned>(state, drop);
    *index = tensor->register_hook([owned, call](Tensor gradient) -> Tensor {
      if (!gradient.defined()) return gradient;
      Tensor* output = nullptr;
      call_rust([&](Sink* sink) { return call(owned->state, &gradient, &output, sink); });
      std::unique_ptr<Tensor> changed(output);
      return changed ? *changed : Tensor();
    });
  });
}

FT_API int ft_hook_gradient_remove(const Tensor* tensor, uint32_t index, Failure* failure) {
  return guarded(failure, [&] { tensor->remove_hook(index); });
}

static void check_leaf(const Tensor& tensor) {
  TORCH_CHECK(
      tensor.defined() && tensor.is_leaf() && tensor.requires_grad(),
      "only a leaf that requires a gradient accumulates one");
}

FT_API int ft_hook_accumulated(const Tensor* tensor, void* state, DropFn drop, HookFn call, Failure* failure) {
  return guarded(failure, [&] {
    auto hook = std::make_unique<AccumulatedHook>(state, drop, call);
    check_leaf(*tensor);
    torch::autograd::impl::set_post_acc_grad_hooks(*tensor, std::move(hook));
  });
}

FT_API int ft_hook_accumulated_clear(const Tensor* tensor, Failure* failure) {
  return guarded(failure, [&] {
    check_leaf(*tensor);
    torch::autograd::impl::set_post_acc_grad_hooks(*tensor, nullptr);
  });
}
