"""Intervals, verdicts, prompts and texts, each against an answer found by hand."""

from __future__ import annotations

import json
import random
from hashlib import sha256
from pathlib import Path

import pytest

from quantize.demo import find_gguf
from quantize.errors import ToolError
from quantize.serving.acceptance import (
    Acceptance,
    Measured,
    RequestAcceptance,
    add_up,
    length_interval,
    length_ratio,
    mean_interval,
    rate_intervals,
    summarize,
)
from quantize.serving.client import Answer, read_answer
from quantize.serving.intervals import Interval
from quantize.serving.lossless import check_lossless, compare
from quantize.serving.prompts import Message, Prompt, default_prompts, read_prompts
from quantize.serving.retention import (
    Cell,
    check_retention,
    check_wiring,
    decide,
    measure_cells,
    noise_floor,
    plan_cells,
    require_baseline,
    retain,
)


def request(index: int, steps: int, *positions: int, domain: str = "math") -> RequestAcceptance:
    accepted = sum(positions)
    return RequestAcceptance(
        index, domain, steps, accepted, len(positions) * steps, 9, "text", "stop", positions
    )


# Intervals


def test_bootstrap_of_two_prompts_by_hand() -> None:
    """AL 1 and 2 with equal steps: a resample has 1, 1.5 or 2, with chances 1/4, 1/2, 1/4."""
    found = length_interval([request(0, 10, 0), request(1, 10, 10)])
    assert found == Interval(1.5, 1.0, 2.0)


def test_equal_prompts_leave_no_width() -> None:
    found = length_interval([request(index, 10, 4) for index in range(8)])
    assert (found.value, found.low, found.high) == pytest.approx((1.4, 1.4, 1.4))


def test_width_agrees_with_the_normal_approximation() -> None:
    """400 prompts, half at AL 1 and half at AL 2: the mean's standard error is 0.5/20 = 0.025."""
    found = length_interval([request(i, 10, 10 * (i % 2)) for i in range(400)])
    assert found.low == pytest.approx(1.5 - 1.96 * 0.025, abs=0.003)
    assert found.high == pytest.approx(1.5 + 1.96 * 0.025, abs=0.003)


def test_turns_of_one_prompt_are_drawn_together() -> None:
    """Two prompts of 50 equal turns each are still two draws."""
    turns = [request(i % 2, 10, 10 * (i % 2)) for i in range(100)]
    assert length_interval(turns) == Interval(1.5, 1.0, 2.0)


def test_one_prompt_has_no_interval() -> None:
    assert length_interval([request(3, 10, 4)]) == Interval(1.4, None, None)


def test_pooled_and_mean_of_requests_are_different_figures() -> None:
    """90 steps at AL 1, 10 steps at AL 2, and a request without a step."""
    requests = [request(0, 90, 0), request(1, 10, 10), request(2, 0, 0)]
    assert length_interval(requests).value == pytest.approx(1.1)
    assert mean_interval(requests).value == pytest.approx(1.5)


def test_rates_by_position() -> None:
    first, second = rate_intervals([request(0, 10, 6, 1), request(1, 30, 6, 3)])
    assert (first.value, second.value) == pytest.approx((12 / 40, 4 / 40))
    assert first.low is not None
    assert first.high is not None
    assert (first.low, first.high) == pytest.approx((6 / 30, 6 / 10))


def test_no_steps_are_no_data() -> None:
    for statistic in (length_interval, mean_interval, rate_intervals):
        with pytest.raises(ToolError, match="no data"):
            statistic([request(0, 0, 0)])
    with pytest.raises(ToolError, match="no data"):
        length_interval([])


def test_summary_by_domain() -> None:
    requests = [request(0, 10, 10, domain="math"), request(1, 10, 0, domain="qa")]
    summary = summarize(add_up([*requests, request(2, 0, 0, domain="stem")]))
    assert summary["domains"]["math"]["length"]["value"] == 2
    assert summary["domains"]["qa"]["length"]["value"] == 1
    assert "stem" not in summary["domains"]
    assert summary["requests_without_a_step"] == 1
    assert json.loads(json.dumps(summary)) == summary


# Retention


def test_retention_is_paired_by_prompt() -> None:
    """Each prompt keeps exactly 0.9 of its length: no resample can differ, however they vary."""
    theirs = [request(i, 100, 10 * i) for i in range(11)]  # lengths 1.0 … 2.0
    # 0.9·(100 + 10·i) = 100 + accepted would be negative for short ones: fewer tokens, more steps.
    ours = [request(i, 100, 10 * i) for i in range(11)]
    ours = [
        RequestAcceptance(r.prompt_index, r.domain, 100, 9 * r.prompt_index - 10, 0, 0, "", "", ())
        for r in ours
    ]
    found = length_ratio(ours, theirs)
    assert (found.value, found.low, found.high) == pytest.approx((0.9, 0.9, 0.9))


def test_retention_of_unlike_prompts_has_a_width() -> None:
    ours = [request(0, 10, 0), request(1, 10, 10)]
    theirs = [request(0, 10, 10), request(1, 10, 10)]
    assert length_ratio(ours, theirs) == Interval(0.75, 0.5, 1.0)


def test_retention_needs_the_same_prompts() -> None:
    with pytest.raises(ToolError, match="different prompts"):
        length_ratio([request(0, 10, 4)], [request(1, 10, 4)])


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.971, 0.99, "pass"),
        (0.97, 0.99, "pass"),
        (0.95, 0.969, "fail"),
        (0.95, 0.97, "undecided"),
        (0.969, 0.99, "undecided"),
        (None, None, "undecided"),
    ],
)
def test_verdicts(low: float | None, high: float | None, verdict: str) -> None:
    ratio = Interval(0.97, low, high)
    assert decide(ratio, 0.97) == verdict
    status = "not_measured" if verdict == "undecided" else verdict
    check = check_retention(ratio, 0.97, None)
    assert check.status == status
    assert ("undecided" in check.measured) == (verdict == "undecided")


def test_a_margin_below_the_noise_floor_is_said() -> None:
    assert "noise floor" in check_retention(Interval(0.975, 0.971, 0.98), 0.97, 0.01).detail
    assert check_retention(Interval(0.99, 0.98, 1.0), 0.97, 0.01).detail == ""


def test_a_bar_without_a_baseline_is_refused() -> None:
    with pytest.raises(ToolError, match="needs a baseline"):
        require_baseline(0.97, plan_cells("t", "d", None, None))


def test_cells_are_all_combinations_candidate_first_baseline_last() -> None:
    found = [(cell.target, cell.draft) for cell in plan_cells("T", "D", "t", "d")]
    assert found == [("T", "D"), ("T", "d"), ("t", "D"), ("t", "d")]
    assert [(c.target, c.draft) for c in plan_cells("T", "D", None, "d")] == [
        ("T", "D"),
        ("T", "d"),
    ]


def acceptance(*requests: RequestAcceptance) -> Acceptance:
    return add_up(requests)


def test_repeats_are_interleaved_and_state_the_noise_floor() -> None:
    cells = plan_cells("T", "D", None, "d")
    order: list[tuple[str, int]] = []
    lengths = iter((1.5, 1.6, 1.53, 1.6))

    def run(cell: Cell, repeat: int) -> Measured:
        order.append((cell.draft, repeat))
        steps = 1000
        taken = request(0, steps, round((next(lengths) - 1) * steps))
        return Measured(acceptance(taken), (), 1.0)

    runs = measure_cells(cells, 2, run)
    assert order == [("D", 0), ("d", 0), ("D", 1), ("d", 1)]
    found = {name: [run.acceptance for run in repeats] for name, repeats in runs.items()}
    assert noise_floor(found) == pytest.approx(1 - 1.5 / 1.53)
    assert noise_floor({"one": found[cells[0].name][:1]}) is None
    (retention,) = retain(cells, found, seed=0)
    assert (retention.cell, retention.baseline) == (cells[0].name, cells[1].name)
    assert retention.ratio.value == pytest.approx((1.5 + 1.53) / 3.2)


def test_almost_nothing_accepted_is_a_wiring_fault() -> None:
    fault = check_wiring("x", acceptance(request(0, 1000, 19, 10)))
    assert fault.status == "fail"
    for cause in ("wiring fault", "exclusions", "d2t", "eagle3", "architecture"):
        assert cause in fault.detail
    # A poor draft is not a fault.
    assert check_wiring("x", acceptance(request(0, 1000, 20, 0))).status == "pass"


# Lossless


def told(
    index: int,
    tokens: tuple[int, ...],
    alternatives: tuple[dict[int, float], ...] = (),
    turn: int = 0,
) -> Answer:
    prompt = Prompt(index, "qa", (Message("user", "?"),))
    return Answer(prompt, turn, "", tokens, "stop", None, 0, alternatives)


def test_texts_are_compared_token_by_token() -> None:
    sure: tuple[dict[int, float], ...] = (
        {5: -0.1, 6: -3.0},
        {7: -0.7, 8: -0.9},
        {9: -0.1, 1: -6.0},
    )
    plain = [told(0, (5, 7, 9), sure), told(1, (5, 7, 9), sure), told(2, (5, 7, 9), sure)]
    drafted = [told(0, (5, 7, 9)), told(1, (5, 8, 2)), told(2, (5, 7, 1))]
    result = compare(plain, drafted)
    assert result.prompts == 3
    tie, fault = result.differences
    assert (tie.prompt_index, tie.position, tie.near_tie) == (1, 1, True)
    assert tie.margin == pytest.approx(0.2)
    assert (fault.prompt_index, fault.position, fault.near_tie) == (2, 2, False)
    assert fault.margin == pytest.approx(5.9)
    check = check_lossless(result)
    assert check.status == "fail"
    assert "1 of 3 identical, 1 part at a near-tie" in check.measured
    assert check_lossless(compare(plain[:2], drafted[:2])).status == "pass"


def test_a_token_beyond_the_list_is_a_fault_however_flat_the_list() -> None:
    result = compare([told(0, (5,), ({5: -0.1, 6: -0.2},))], [told(0, (9,))])
    assert result.differences[0].bounded
    assert result.faults


def test_a_text_that_just_ends_is_a_fault() -> None:
    plain = told(0, (5, 6), ({5: -0.1}, {6: -0.1}))
    assert compare([plain], [told(0, (5,))]).faults


def test_turns_after_a_difference_are_not_compared() -> None:
    flat: tuple[dict[int, float], ...] = ({5: -0.7, 6: -0.8},)
    plain = [told(0, (5,), flat), told(0, (5,), ({5: -0.1, 6: -9.0},), turn=1)]
    result = compare(plain, [told(0, (6,)), told(0, (6,), turn=1)])
    assert [found.turn for found in result.differences] == [0]


def test_answers_to_other_prompts_are_refused() -> None:
    with pytest.raises(ToolError, match="different prompts"):
        compare([told(0, (5,))], [told(1, (5,))])


def test_an_answer_without_token_ids_is_refused() -> None:
    reply = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}
    with pytest.raises(ToolError, match="token_ids"):
        read_answer(json.dumps(reply).encode(), Prompt(0, "qa", ()), 0)


# Prompts


def test_default_prompts_are_the_held_out_set() -> None:
    found = read_prompts(default_prompts())
    domains = [prompt.domain for prompt in found.prompts]
    assert (len(domains), len(set(domains)), found.warnings) == (88, 11, ())
    assert found.digest == sha256(default_prompts().read_bytes()).hexdigest()
    assert {len(prompt.messages) for prompt in found.prompts} == {1}


def test_prompts_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    lines = [{"prompt": "One?", "domain": "qa"}, {"messages": turns}]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    first, second = read_prompts(path).prompts
    assert first == Prompt(0, "qa", (Message("user", "One?"),))
    assert second == Prompt(1, "other", (Message("system", "Be brief."), Message("user", "Hi")))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: expected one of prompt and messages"),
        ('{"domain": "qa"}', "expected one of prompt and messages"),
        ('{"prompt": "a", "messages": []}', "expected one of prompt and messages"),
        ('{"prompt": " "}', "text that is not empty"),
        ('{"messages": []}', "last message is not the user's"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "needs a role"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "not the user's"),
        ("", "found no prompt"),
    ],
)
def test_lines_that_are_no_prompt_are_named(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(ToolError, match=said):
        read_prompts(path)


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty prompts of 64 random tokens of a real vocabulary, and forty of real prompts."""
    from transformers import AutoTokenizer

    source = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    draw = random.Random(0)
    texts = [
        tokenizer.decode([draw.randrange(len(tokenizer)) for _ in range(64)]) for _ in range(40)
    ]
    lines = [{"prompt": text or "x", "domain": "noise"} for text in texts]
    real = default_prompts().read_text().splitlines()
    path = tmp_path_factory.mktemp("noise") / "prompts.jsonl"
    path.write_text("\n".join([*real, *map(json.dumps, lines)]) + "\n")
    return path


def test_random_tokens_are_warned_of_by_domain(noise: Path) -> None:
    (warning,) = read_prompts(noise).warnings
    assert "domain noise look like random tokens" in warning
    assert "overstate acceptance" in warning
