//! Gradients that the losses leave to autograd and to parameters.

use deepspec_ops::range;
use tch::Tensor;

/// Runs autograd from a surrogate of the losses back to the parameters.
pub(crate) fn backward(surrogate: &Tensor) {
    let _range = range(c"backward");
    surrogate.backward();
}

/// The gradient of a parameter, to be added to in place; zeros where it has none yet.
pub(crate) fn gradient(parameter: &Tensor) -> Tensor {
    if !parameter.grad().defined() {
        // Only a backward pass makes a gradient: that of the first row makes all of it, and it is cleared.
        tch::with_grad(|| parameter.narrow(0, 0, 1).sum(None).backward());
        let _ = parameter.grad().zero_();
    }
    parameter.grad()
}
