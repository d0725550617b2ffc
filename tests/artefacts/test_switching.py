"""One loaded artefact at run time: switched between sizes, in threads at once, and drafting for itself."""

import copy
import itertools
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tiny
from flexrank import collect_moments, collect_rows, decompose_, distill_, probe_sensitivity, refit_
from flexrank.artefacts.deployed import STATE, save_deployed
from flexrank.artefacts.elastic import load_elastic, save_elastic
from flexrank.deployment import deploy
from flexrank.errors import FlexrankError
from flexrank.files import digest_file
from flexrank.nn.select import select_layers
from flexrank.nn.size_lock import ATTRIBUTE
from flexrank.nn.switch import full_profile, nested_layers, set_budget, submodel, use_profile
from flexrank.profiles import ProfileChain

Loaded = tuple[nn.Module, ProfileChain]


def loaded(name: str, directory: Path, **limits: Any) -> Loaded:
    """The network `name`, its sizes with vectors of their own, as an artefact gives it back."""
    if not directory.exists():
        model = tiny.with_sizes(tiny.elastic(name))
        factory = f"tiny:{name}" if name in tiny.PLAIN else None
        save_elastic(model, tiny.chain_of(model), directory, factory=factory)
    return load_elastic(directory, **limits)


def outputs_at(model: nn.Module, chain: ProfileChain, batch: Any) -> dict[float, torch.Tensor]:
    """The outputs by requested budget, each profile set by hand."""
    found = {}
    for budget in chain.budgets:
        with use_profile(model, chain.at(budget)):
            found[budget] = tiny.outputs(model, batch)
    return found


def memory(model: nn.Module) -> set[int]:
    return {tensor.data_ptr() for tensor in itertools.chain(model.parameters(), model.buffers())}


@pytest.mark.parametrize("name", ["llama_tied", "tied_blocks"])
def test_a_loaded_model_switches_to_its_chains_sizes(name: str, tmp_path: Path) -> None:
    model, chain = loaded(name, tmp_path / "elastic")
    batch, held = tiny.batch_for(name), memory(model)
    wanted = outputs_at(model, chain, batch)
    for budget in chain.budgets:
        entry = set_budget(model, budget)
        assert entry == chain.entry_at(budget) and entry.requested == budget
        assert {layer: one.rank for layer, one in nested_layers(model).items()} == chain.at(budget)
        assert torch.equal(tiny.outputs(model, batch), wanted[budget])
    second = chain.entries[1]
    assert set_budget(model, max_params=chain.model_parameters(second)) == second
    assert set_budget(model, 1.0, max_bytes=chain.model_bytes(second)) == second
    assert memory(model) == held


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # dynamo's own, on its first import
@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_a_wrapped_model_is_switched_cut_and_saved_as_the_model_inside(wrap: Any, tmp_path: Path) -> None:
    model, chain = loaded("llama_tied", tmp_path / "elastic")
    wrapped, entry = wrap(model), chain.entries[1]
    assert set_budget(wrapped, chain.budgets[1]) == entry
    assert ATTRIBUTE in model.__dict__ and ATTRIBUTE not in wrapped.__dict__
    assert {layer: one.rank for layer, one in nested_layers(model).items()} == entry.profile
    assert type(submodel(wrapped, entry.profile)) is type(model)
    small = deploy(wrapped, entry.profile)
    assert type(small) is type(model)
    whole = deploy(wrapped, full_profile(model), base=wrap(model))
    assert type(whole) is type(model) and not whole.training
    save_elastic(wrapped, chain, tmp_path / "again")
    digests = [{p.name: digest_file(p) for p in (tmp_path / name).glob("*.*s*")} for name in ("elastic", "again")]
    assert digests[0] == digests[1] and {"config.json"} < digests[0].keys()
    save_deployed(wrap(small), tmp_path / "small")
    assert load_file(tmp_path / "small" / STATE).keys() <= small.state_dict().keys()
    needing = (
        select_layers, lambda one: collect_rows(one, [], {}), lambda one: collect_moments(one, [], {}),
        lambda one: probe_sensitivity(one, float),
        lambda one: distill_(one, model, [], [], steps=1), lambda one: refit_(one, {}, model, []),
        lambda one: decompose_(one, {}),
    )  # fmt: skip
    for function in needing:
        with pytest.raises(FlexrankError, match=r"wraps a model; give the model inside, and wrap what is deployed"):
            function(wrapped)


def test_the_chain_travels_with_the_model_and_its_copies(tmp_path: Path) -> None:
    model, chain = loaded("perceptron", tmp_path / "elastic", budget=0.5)
    for one in (model, copy.deepcopy(model), submodel(model, chain.entries[0].profile)):
        assert set_budget(one, 1.0) == chain.entries[-1]
        assert all(layer.chain is chain for layer in nested_layers(one).values())
    fresh = tiny.elastic("perceptron")
    with pytest.raises(FlexrankError, match="Sequential was not read by load_elastic and has no chain; give chain="):
        set_budget(fresh, 0.5)
    assert set_budget(fresh, 0.5, chain=chain) == chain.entry_at(0.5)
    assert full_profile(fresh) != {name: layer.rank for name, layer in nested_layers(fresh).items()}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "no limit is given; give budget, max_params or max_bytes"),
        ({"budget": 1.5}, "budget 1.5 is out of range"),
        ({"max_params": 3}, "max_params=3 is too small"),
    ],
)
def test_a_wrong_budget_is_named_and_changes_nothing(limits: Any, message: str, tmp_path: Path) -> None:
    model, chain = loaded("perceptron", tmp_path / "elastic")
    set_budget(model, 0.5)
    with pytest.raises(FlexrankError, match=message):
        set_budget(model, **limits)
    assert {name: layer.rank for name, layer in nested_layers(model).items()} == chain.at(0.5)
    with pytest.raises(FlexrankError, match=r"layer '(0\.)?\d' is not in the (model|profile)"):
        set_budget(nn.Sequential(model), 0.5)


def test_each_thread_switches_a_size_of_its_own(tmp_path: Path) -> None:
    """Oracle: one size after the other in one thread."""
    model, chain = loaded("llama_tied", tmp_path / "elastic")
    batch = tiny.batch_for("llama_tied")
    wanted = outputs_at(model, chain, batch)
    set_budget(model, 0.8)

    def serve(seed: int) -> bool:
        own, draw = submodel(model, chain.at(0.25)), random.Random(seed)
        alike = []
        for _ in range(12):
            budget = draw.choice(chain.budgets)
            set_budget(own, budget)
            alike.append(torch.equal(tiny.outputs(own, batch), wanted[budget]))
        return all(alike)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(serve, range(8)))
    assert torch.equal(tiny.outputs(model, batch), wanted[chain.entry_at(0.8).requested or 0])


def test_threads_run_a_tree_that_others_switch(tmp_path: Path) -> None:
    """Oracle: each size alone in one thread. Passes that fail, and copies of the tree, do not stop a switch."""
    model, chain = loaded("llama_tied", tmp_path / "elastic")
    batch = tiny.batch_for("llama_tied")
    wanted = outputs_at(model, chain, batch)
    set_budget(model, 0.8)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model()

    def use(seed: int) -> bool:
        draw, alike = random.Random(seed), []
        for _ in range(12):
            if seed % 2:
                set_budget(model, draw.choice(chain.budgets))
            else:
                found = tiny.outputs(model, batch)
                alike.append(any(torch.equal(found, one) for one in wanted.values()))
        return all(alike)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(use, range(6)))
    finally:
        sys.setswitchinterval(interval)
    ranks = {name: layer.rank for name, layer in nested_layers(model).items()}
    assert ranks in [dict(chain.at(budget)) for budget in chain.budgets]
    assert copy.deepcopy(model)._flexrank_size_lock is not model._flexrank_size_lock


def at_its_largest(directory: Path) -> tuple[nn.Module, Any, float, float, dict[float, torch.Tensor]]:
    """A perceptron at its largest budget, a batch, the least and the largest budget, and the outputs at each."""
    model, chain = loaded("perceptron", directory)
    batch = tiny.batch_for("perceptron")
    wanted = outputs_at(model, chain, batch)
    set_budget(model, chain.budgets[-1])
    return model, batch, chain.budgets[0], chain.budgets[-1], wanted


def test_a_switch_waits_for_a_pass_under_way_and_the_next_one_for_it(tmp_path: Path) -> None:
    model, batch, least, most, wanted = at_its_largest(tmp_path / "elastic")
    arrived, leave = threading.Event(), threading.Event()
    first, last = list(nested_layers(model).values())[:: len(nested_layers(model)) - 1]

    def stop(*_: Any) -> None:
        arrived.set()
        assert leave.wait(60)

    hook = first.register_forward_hook(stop)
    with ThreadPoolExecutor(3) as pool:
        under_way = pool.submit(tiny.outputs, model, batch)
        assert arrived.wait(60)
        switch = pool.submit(set_budget, model, least)
        rank = last.rank
        with pytest.raises(TimeoutError):
            switch.result(0.2)
        assert last.rank == rank
        hook.remove()
        after = pool.submit(tiny.outputs, model, batch)
        with pytest.raises(TimeoutError):
            after.result(0.2)
        leave.set()
        assert torch.equal(under_way.result(), wanted[most])
        assert switch.result().requested == least
        assert torch.equal(after.result(), wanted[least])


def test_a_pass_may_switch_the_size_itself(tmp_path: Path) -> None:
    """Within it nothing else runs, so it does not wait for itself."""
    model, batch, least, most, wanted = at_its_largest(tmp_path / "elastic")
    first, small = next(iter(nested_layers(model).values())), dict[str, Any]()

    def once(*_: Any) -> None:
        hook.remove()
        set_budget(model, least)
        small["outputs"] = tiny.outputs(model, batch)  # a pass within a pass

    hook = first.register_forward_pre_hook(once)
    tiny.outputs(model, batch)
    assert torch.equal(small["outputs"], wanted[least])


@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_a_small_size_of_the_same_weights_drafts(name: str, tmp_path: Path) -> None:
    """Oracle: greedy decoding of the large size alone. Some drafts must be right and some wrong."""
    model, chain = loaded(name, tmp_path / "elastic")
    set_budget(model, 0.8)
    calls = {"large": 0, "small": 0}
    for seed, budget in enumerate((0.25, 0.5, 0.5)):
        small = submodel(model, chain.at(budget))
        assert memory(small) == memory(model)
        small.generation_config.update(num_assistant_tokens=3, assistant_confidence_threshold=0.0)
        prompt = torch.randint(3, tiny.VOCABULARY, (1, 3 + seed), generator=torch.Generator().manual_seed(seed))
        keys = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
        alone = model.generate(prompt, **keys)
        hooks = [
            one.register_forward_hook(lambda *_, key=key: calls.__setitem__(key, calls[key] + 1))
            for key, one in (("large", model), ("small", small))
        ]
        together = model.generate(prompt, assistant_model=small, **keys)
        for hook in hooks:
            hook.remove()
        assert torch.equal(together, alone) and together.shape == (1, 13 + seed)
    accepted = 3 * 10 - calls["large"]
    assert 0 < accepted < calls["small"]


def test_a_pass_that_ctrl_c_has_ended_holds_up_nobody(tmp_path: Path) -> None:
    """torch runs no hook after a KeyboardInterrupt; a pass that still runs is waited for."""
    model, chain = loaded("perceptron", tmp_path / "elastic")
    set_budget(model, 0.5)
    layer: Any = model[0]
    with layer.register_forward_pre_hook(lambda *_: _raise(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
        model(tiny.batch_for("perceptron"))
    worker = threading.Thread(target=set_budget, args=(model, 1.0), daemon=True)
    worker.start()
    worker.join(20)
    assert not worker.is_alive() and nested_layers(model)["0"].rank == chain.at(1.0)["0"]
    reached, goes_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        reached.set()
        goes_on.wait(20)

    with layer.register_forward_pre_hook(wait):
        running = threading.Thread(target=model, args=(tiny.batch_for("perceptron"),), daemon=True)
        running.start()
        reached.wait(20)
        worker = threading.Thread(target=set_budget, args=(model, 0.5), daemon=True)
        worker.start()
        worker.join(1.5)  # longer than a change's patience
        assert worker.is_alive() and nested_layers(model)["0"].rank == chain.at(1.0)["0"]
        goes_on.set()
        worker.join(20)
    assert not worker.is_alive() and nested_layers(model)["0"].rank == chain.at(0.5)["0"]
    set_budget(model, 1.0)


def test_a_pass_that_began_before_the_first_change_ends_well(tmp_path: Path) -> None:
    """torch runs hooks that are added meanwhile after a pass, not before it."""
    model, chain = loaded("perceptron", tmp_path / "elastic")
    seen: list[Any] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    layer: Any = model[0]

    def switch(*_: Any) -> None:
        set_budget(model, 0.5)

    with layer.register_forward_pre_hook(switch):
        model(tiny.batch_for("perceptron"))
        model(tiny.batch_for("perceptron"))
    assert len(seen) == 2 and nested_layers(model)["0"].rank == chain.at(0.5)["0"]


def test_a_change_does_not_wait_for_a_pass_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread lives on; without a look at who still runs, a change waits for it only while it runs."""
    monkeypatch.setattr("flexrank.nn.size_lock.PATIENCE", None)
    model, chain = loaded("perceptron", tmp_path / "elastic")
    set_budget(model, 1.0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model, tiny.batch_for("perceptron")).result()
        change = threading.Thread(target=set_budget, args=(model, 0.5), daemon=True)
        change.start()
        change.join(60)
    assert not change.is_alive() and nested_layers(model)["0"].rank == chain.at(0.5)["0"]


def _raise(error: BaseException) -> None:
    raise error
