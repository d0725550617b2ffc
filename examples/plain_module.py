"""Any torch module: `python examples/plain_module.py` makes a network of your own elastic, and exports it."""

import torch
from torch import nn

import flexrank as fr


def build() -> nn.Module:
    """Returns the bare architecture; a fresh process that loads the export calls it by name, `plain_module:build`."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))


def main() -> None:
    """Trains a network on a made-up task, makes it elastic, and exports its size at budget 0.3."""
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64) @ torch.randn(64, 64).div(8)
    targets = (inputs @ torch.randn(64, 10)).argmax(-1)
    model, teacher = build(), build()
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=2e-3)
    for step in range(200):
        rows = torch.arange(256) + 256 * (step % 12)
        nn.functional.cross_entropy(teacher(inputs[rows]), targets[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(teacher.eval().state_dict())

    batches = list(inputs[:3072].split(256))
    fr.decompose_(model.eval(), fr.collect_moments(model, batches, fr.select_layers(model)))
    evaluate = fr.distillation_evaluator(teacher, batches[:2], fr.LogitObjective())
    chain = fr.allocate_ranks(fr.probe_sensitivity(model, evaluate), budgets=[0.7, 0.5, 0.3])
    fr.distill_(model, teacher, batches, chain, objective=fr.LogitObjective(), steps=200, learning_rate=1e-3)

    for budget in (1.0, *reversed(chain.budgets)):
        with fr.use_profile(model, chain.at(budget)), torch.inference_mode():
            agreement = (model(inputs[3072:]).argmax(-1) == teacher(inputs[3072:]).argmax(-1)).float().mean()
        print(f"budget {budget}: agrees with the original on {agreement:.1%} of new inputs")
    small = fr.deploy(model, chain.at(0.3))
    fr.export(small, "runs/example/plain", inputs[:8], factory="plain_module:build")
    print(f"{sum(p.numel() for p in small.parameters())} of {sum(p.numel() for p in teacher.parameters())} parameters")


if __name__ == "__main__":
    main()
