import json

import numpy as np
import pytest

from flexrank.errors import FlexrankError
from flexrank.files import read_json, write_json
from flexrank.profiles import ChainEntry, Footprint, ProfileChain, RankProfile, SensitivityTable, SlackTable

FOOTPRINT = Footprint(other_parameters=100, other_bytes=333, bytes_per_parameter=2)


def chain_of(*rows: tuple[int, int, int, float, float | None]) -> ProfileChain:
    entries = tuple(ChainEntry(RankProfile({"a": a, "b": b}), cost, error, want) for a, b, cost, error, want in rows)
    return ProfileChain(entries, 100, FOOTPRINT, "joint", 0.1 + 0.2)


CHAIN = chain_of((1, 1, 20, 0.9, None), (2, 1, 40, 0.5, 0.4), (2, 3, 70, 0.1 + 0.2, 0.75), (4, 4, 100, 0.0, 1.0))


def test_at_picks_the_largest_within_a_budget_parameters_or_bytes():
    assert CHAIN.at(0.2) == {"a": 1, "b": 1}
    assert CHAIN.at(0.69) == {"a": 2, "b": 1}
    assert CHAIN.at(0.7) == {"a": 2, "b": 3}
    assert CHAIN.at(1.0) == {"a": 4, "b": 4}
    assert CHAIN.at(max_params=100 + 40) == {"a": 2, "b": 1}
    assert CHAIN.at(max_params=100 + 39) == {"a": 1, "b": 1}
    assert CHAIN.at(max_bytes=333 + 2 * 70) == {"a": 2, "b": 3}
    assert CHAIN.at(max_bytes=333 + 2 * 70 - 1) == {"a": 2, "b": 1}


def test_bytes_by_another_width_and_a_shorter_chain():
    """By hand: 100 other parameters of 2 bytes and 133 more bytes, then 4 bytes each; 70 parameters in the layers."""
    wide = CHAIN.counted_in(4)
    assert [one.model_bytes(one.entry_at(0.7)) for one in (CHAIN, wide)] == [333 + 140, 533 + 280]
    assert wide.model_parameters(wide.entry_at(0.7)) == 170
    assert CHAIN.up_to(CHAIN.entry_at(0.7)).entries == CHAIN.entries[:3]


def test_a_budget_above_the_largest_size_takes_it_with_a_warning(caplog):
    for chain in (CHAIN, chain_of((1, 1, 20, 0.9, 0.2), (2, 3, 70, 0.3, 0.75))):
        for budget in (0.2, 0.7, 0.75):
            chain.at(budget)
    CHAIN.at(1.0), chain.at(0.72), chain.at(max_params=10**6)
    assert not caplog.text
    assert chain.at(0.8) == {"a": 2, "b": 3}
    assert "budget 0.8 is above the largest size here, 0.75" in caplog.text


def test_a_requested_budget_gives_the_profile_that_was_solved_for_it():
    assert CHAIN.at(0.75) == {"a": 2, "b": 3}
    spare = chain_of((1, 1, 20, 0.9, 0.4), (2, 1, 30, 0.8, None), (4, 4, 100, 0.0, None))
    assert spare.at(0.4) == {"a": 1, "b": 1}
    assert spare.at(0.39) == spare.at(0.4, max_error=0.9) == {"a": 2, "b": 1}


def test_at_picks_the_smallest_within_an_error():
    assert CHAIN.at(max_error=0.5) == {"a": 2, "b": 1}
    assert CHAIN.at(max_error=0.49) == {"a": 2, "b": 3}
    below = chain_of((1, 1, 20, -0.25, 0.4), (2, 1, 30, -0.5, None), (4, 4, 100, 0.0, None))  # of the paper's procedure
    assert below.at(max_error=-0.5) == {"a": 2, "b": 1} and below.at(max_error=-0.25) == {"a": 1, "b": 1}
    assert CHAIN.at(1.0, max_error=0.5) == {"a": 4, "b": 4}  # a budget is spent


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "no limit is given; give budget, max_params or max_bytes"),
        ({"budget": 0}, "budget 0 is out of range"),
        ({"budget": 1.5}, "budget 1.5 is out of range"),
        ({"budget": 0.19}, "budget=0.19 is too small; the least that this chain offers is 0.2"),
        ({"max_params": 119}, "the least that this chain offers is 120"),
        ({"max_bytes": 372}, "the least that this chain offers is 373"),
        ({"budget": 0.2, "max_error": 0.5}, "max_error=0.5 is too small; the least that this chain offers is 0.9"),
    ],
)
def test_limits_that_nothing_meets_are_told(limits, message):
    with pytest.raises(FlexrankError) as caught:
        CHAIN.at(**limits)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_requested_entries_are_told_apart():
    assert CHAIN.budgets == (0.4, 0.75, 1.0)
    assert [entry.parameters for entry in CHAIN.requested] == [40, 70, 100]


def test_a_chain_must_be_nested_and_rise():
    with pytest.raises(FlexrankError, match="at least one"):
        ProfileChain((), 1, FOOTPRINT, "joint")
    with pytest.raises(FlexrankError, match="nested"):
        chain_of((2, 1, 20, 0.5, None), (1, 2, 40, 0.4, None))
    with pytest.raises(FlexrankError, match="rise in cost"):
        chain_of((1, 1, 40, 0.5, None), (1, 2, 20, 0.4, None))


def test_a_rank_profile_is_a_hashable_mapping():
    profile = RankProfile({"a": 1, "b": 2})
    assert profile == {"b": 2, "a": 1} and hash(profile) == hash(RankProfile({"b": 2, "a": 1}))
    assert type(RankProfile({"a": np.int64(3)})["a"]) is int
    assert profile.fits_in({"a": 1, "b": 3})
    assert not profile.fits_in({"a": 1, "b": 1})
    assert not profile.fits_in({"a": 1, "b": 2, "c": 3})
    with pytest.raises(FlexrankError, match="layer 'a' has rank 0"):
        RankProfile({"a": 0})


def test_a_predicted_error_is_the_sum_of_the_layers():
    """Rank 3 of b is halfway between 2 and 4; both layers count."""
    table = SensitivityTable(
        shapes={"a": (4, 4), "b": (4, 4)}, ranks={"a": (1, 2, 4), "b": (2, 4)},
        errors={"a": (3.0, 2.5, 0.0), "b": (2.0, 0.0)}, baseline=0.5, footprint=Footprint(0, 0, 4),
    )  # fmt: skip
    assert table.predicted_error({"a": 2, "b": 3}) == 2.5 + 1.0
    assert table.predicted_error({"a": 4, "b": 4}) == 0


def test_chains_and_tables_keep_every_bit_through_a_file(tmp_path):
    table = SensitivityTable({"a": (3, 4)}, {"a": (1, 3)}, {"a": (0.1 + 0.2, 0.0)}, 1 / 3, FOOTPRINT)
    write_json(tmp_path / "table.json", table.to_json())
    assert SensitivityTable.from_json(read_json(tmp_path / "table.json")) == table
    write_json(tmp_path / "chain.json", CHAIN.to_json())
    assert ProfileChain.from_json(read_json(tmp_path / "chain.json")) == CHAIN


def test_a_chain_is_written_by_what_changes_and_read_in_whole_profiles_too():
    chain = chain_of((1, 1, 20, 0.5, None), (1, 2, 40, 0.4, 0.5), (3, 2, 80, 0.0, None))
    written = chain.to_json()
    assert [entry["profile"] for entry in written["entries"]] == [{"a": 1, "b": 1}, {"b": 2}, {"a": 3}]
    whole = [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 3, "b": 2}]
    entries = [{**entry, "profile": profile} for entry, profile in zip(written["entries"], whole, strict=True)]
    assert ProfileChain.from_json(written) == ProfileChain.from_json({**written, "entries": entries}) == chain


@pytest.mark.parametrize(("kind", "key"), [(ProfileChain, "entries"), (SensitivityTable, "shapes")])
def test_json_without_a_key_is_told(kind, key):
    with pytest.raises(FlexrankError, match=f"key '{key}' is missing"):
        kind.from_json({})


def test_slack_is_counted_in_the_parameters_and_kept_by_layer_and_rank():
    table = SlackTable("bfloat16", {"a": {10: 2}, "b": {20: 20}})
    shapes = {"a": (40, 40), "b": (40, 60), "c": (8, 8)}
    profile = {"a": 10, "b": 20, "c": 8}
    assert table.parameters(profile, shapes) == 10 * (80 - 10 + 2) + 20 * 100 + 64
    assert SlackTable.from_json(json.loads(json.dumps(table.to_json()))) == table
    with pytest.raises(FlexrankError, match="layer 'a': no slack was chosen for rank 11"):
        table.at("a", 11)
    with pytest.raises(FlexrankError, match="chosen for bfloat16; find_slack for float32"):
        table.require_dtype("float32")


@pytest.mark.parametrize(("change", "message"), [
    (lambda chain: chain["entries"][1].pop("error"), "profile chain's entry: key 'error' is missing"),
    (lambda chain: chain.update(footprint={}), "profile chain's footprint: key 'other_parameters' is missing"),
    (lambda chain: chain.update(dense_parameters=0), "a chain's dense_parameters is 0; it is at least 1"),
])  # fmt: skip
def test_an_edited_chain_is_one_line(change, message):
    written = CHAIN.to_json()
    change(written)
    with pytest.raises(FlexrankError, match=message):
        ProfileChain.from_json(written)
