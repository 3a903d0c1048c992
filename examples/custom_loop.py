"""The ops in a training loop of your own: two functions around parameters that you keep, one residual stream.

Run: python examples/custom_loop.py
"""

import torch

from recsys_norm import ops

HOW = dict(backend="fused", on_unsupported="fallback")


def parameters(width: int, device: str) -> dict[str, torch.Tensor]:
    def weight(rows, columns):
        return (torch.randn(rows, columns, device=device) / columns**0.5).requires_grad_()

    return {
        "up": weight(4 * width, width),
        "down": weight(width, 4 * width),
        "gamma": torch.ones(width, device=device, requires_grad=True),
        "out": weight(1, width),
    }


def predict(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    h = ops.norm_linear(x, p["up"], norm="rms", norm_weight=p["gamma"], **HOW).relu()
    # the sum of the residual stream comes back beside its norm, and the gradients of both are added in one kernel
    y, stream = ops.linear_norm(
        h, p["down"], norm="layer", residual=x, residual_position="before", return_sum=True, **HOW
    )
    return ((y + stream) @ p["out"].T).squeeze(1)


def main(steps: int = 40) -> list[float]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p = parameters(32, device)
    x = torch.randn(1024, 32, device=device)
    label = (x[:, 0] * x[:, 1] > 0).float()
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(predict(p, x), label)
        grads = torch.autograd.grad(loss, list(p.values()))
        with torch.no_grad():
            for value, grad in zip(p.values(), grads):
                value -= 0.3 * grad
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; served by {ops.registry.counts()}")
