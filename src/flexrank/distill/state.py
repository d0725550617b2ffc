"""What an interrupted consolidation goes on from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from flexrank.distill.feed import Feed
from flexrank.errors import FlexrankError
from flexrank.files import directory_aside, read_json, write_json


class State:
    """Everything a resumed run needs: trainable tensors, the optimiser's, the feed's place, and the losses so far."""

    def __init__(
        self,
        path: str | Path | None,
        settings: dict[str, Any],
        trainable: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        feed: Feed,
    ):
        self.path = None if path is None else Path(path)
        self.settings, self.trainable, self.optimizer, self.feed = settings, trainable, optimizer, feed
        self.losses: list[float] = []
        self.choices: list[int] = []
        if self.path is not None and self.path.exists():
            self._load(self.path)

    @property
    def step(self) -> int:
        """Steps taken."""
        return len(self.losses)

    def advance(self, loss: float, choice: int) -> None:
        """Counts a step."""
        self.losses.append(loss)
        self.choices.append(choice)

    def save(self) -> None:
        """Writes everything aside, then in place of what was there; nothing without a path."""
        if self.path is None:
            return
        tensors = {}
        for name, parameter in self.trainable.items():
            tensors[name] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{name}//{key}"] = value
        with directory_aside(self.path, "state.json") as aside:
            safetensors.torch.save_file(tensors, aside / "state.safetensors")
            write_json(
                aside / "state.json",
                {"settings": self.settings, "losses": self.losses, "choices": self.choices, "feed": self.feed.state()},
            )

    @torch.no_grad()
    def _load(self, path: Path) -> None:
        state = read_json(path / "state.json")
        for key, value in self.settings.items():
            if state["settings"].get(key) != value:
                found = state["settings"].get(key)
                raise FlexrankError(f"{path}: was written with {key}={found}, not {value}; remove it or change back")
        with safetensors.safe_open(path / "state.safetensors", framework="pt") as file:
            keys = set(file.keys())
            for name in {key for key in keys if "//" not in key} ^ self.trainable.keys():
                where = "no trainable parameter" if name in self.trainable else "a parameter not trained here,"
                raise FlexrankError(f"{path}: holds {where} {name!r}; it belongs to another run")
            for name, parameter in self.trainable.items():
                kept = file.get_tensor(name)
                if kept.shape != parameter.shape:
                    shapes = f"{tuple(kept.shape)}, not {tuple(parameter.shape)}"
                    raise FlexrankError(f"{path}: parameter {name!r} is {shapes}; it belongs to another model")
                parameter.copy_(kept)
            for key in keys:
                name, separator, slot = key.partition("//")
                if separator:
                    parameter = self.trainable[name]
                    self.optimizer.state[parameter][slot] = file.get_tensor(key).to(parameter.device)
        self.losses, self.choices = state["losses"], state["choices"]
        self.feed.restore(state["feed"])
