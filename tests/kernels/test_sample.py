"""Sampling against transformers' logits processors and against exact probabilities."""

import pytest
import torch
from quantforge_kernels import sample

UINT32 = 1 << 32


def column(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def draw(logits: torch.Tensor, temperature: float, **restrictions: float) -> torch.Tensor:
    """One token a row, each row with its own seed."""
    rows = logits.shape[0]

    def rows_of(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        value = restrictions.get(name)
        return None if value is None else torch.full((rows,), value, dtype=dtype)

    return sample.OP.reference.run(
        logits,
        torch.full((rows,), temperature),
        rows_of("top_k", torch.int64),
        rows_of("top_p", torch.float32),
        rows_of("min_p", torch.float32),
        torch.arange(rows) * 7919 + 3,
        torch.zeros(rows, dtype=torch.int64),
    )


def test_greedy_takes_the_first_of_the_largest_scores() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 1.0]])
    assert sample.OP.reference.run(logits, *[None] * 6).tolist() == [1, 0]


def test_a_row_without_temperature_is_greedy_beside_rows_that_draw() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    seeds, positions = torch.tensor([1, 1]), torch.tensor([0, 0])
    drawn = {
        sample.OP.reference.run(logits, column(0, 5), None, None, None, seeds + i, positions)[
            0
        ].item()
        for i in range(20)
    }
    assert drawn == {logits[0].argmax().item()}


def test_a_row_with_nan_gives_no_token() -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = float("nan")
    assert sample.OP.reference.run(logits, *[None] * 6).tolist() == [0, -1, 0]
    tokens = draw(logits, 1.0, top_p=0.9, top_k=5, min_p=0.1)
    assert tokens[1] == -1
    assert (tokens[[0, 2]] >= 0).all()


@pytest.mark.parametrize("top_k", [1, 3, 40, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_restrictions_keep_the_tokens_that_transformers_keeps(
    top_k: int, top_p: float, min_p: float
) -> None:
    from transformers.generation import logits_process

    scores = 3 * torch.randn(6, 200, generator=torch.Generator().manual_seed(top_k))
    ids = torch.zeros(6, 1, dtype=torch.long)
    expected = logits_process.TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        expected = logits_process.TopPLogitsWarper(top_p)(ids, expected)
    expected = logits_process.MinPLogitsWarper(min_p)(ids, expected)
    ours = sample.restrict(
        scores,
        torch.full((6,), top_k),
        torch.full((6,), top_p),
        torch.full((6,), min_p),
    )
    assert torch.equal(ours, expected)


def test_values_that_restrict_nothing_equal_none() -> None:
    scores = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    ours = sample.restrict(scores, torch.tensor([0, 0]), column(1, 1), column(0, 0))
    assert torch.equal(ours, scores)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_with_their_probabilities(temperature: float) -> None:
    """Counts of 40,000 draws; a chi-square of 11 degrees exceeds 38 once in 10,000 times."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(2))
    draws = 40_000
    counts = torch.bincount(draw(logits.expand(draws, -1), temperature), minlength=12)
    expected = (logits / temperature).softmax(-1) * draws
    assert ((counts - expected) ** 2 / expected).sum() < 38


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """Two fair coins agree half the time: 20,000 trials, five standard deviations."""
    logits = torch.zeros(20_000, 2)
    count = torch.arange(20_000)
    zeros, ones = torch.zeros_like(count), torch.ones(20_000)

    def flips(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return sample.OP.reference.run(logits, ones, None, None, None, seeds, positions)

    by_position, by_seed = flips(zeros, count), flips(count, zeros)
    for flipped in (by_position, by_seed):
        assert abs(flipped.float().mean() - 0.5) < 0.018
        assert abs((flipped[1:] == flipped[:-1]).float().mean() - 0.5) < 0.018
    assert abs((by_position == by_seed).float().mean() - 0.5) < 0.018


def test_a_seeded_row_does_not_depend_on_the_rows_beside_it() -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(3))
    seeds = torch.tensor([5, -1, 2**63 - 1, -(2**63), 0, 1 << 40, 7, 8])
    positions = torch.arange(8)
    temperature = torch.linspace(0.1, 3, 8)
    together = sample.OP.reference.run(logits, temperature, None, None, None, seeds, positions)
    for row in range(8):
        one = slice(row, row + 1)
        alone = sample.OP.reference.run(
            logits[one], temperature[one], None, None, None, seeds[one], positions[one]
        )
        assert alone[0] == together[row]


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % UINT32
    x ^= x >> 15
    x = x * 0x846CA68B % UINT32
    return x ^ (x >> 16)


@pytest.mark.parametrize("seed", [0, 1, 123456789012345, -1, -(2**63), 2**63 - 1])
def test_noise_is_the_documented_hash_in_unsigned_arithmetic(seed: int) -> None:
    position = 77
    unsigned = seed % (1 << 64)
    key_0 = mix(mix(unsigned % UINT32) ^ position)
    key_1 = mix(mix(((unsigned >> 32) + 0x9E3779B9) % UINT32) ^ key_0)
    upper = torch.tensor([mix(mix(v ^ key_0) ^ key_1) >> 9 for v in range(500)])
    expected = -(-((upper.double() + 0.5) / 2**23).log()).log()
    noise = sample.gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 500)
    torch.testing.assert_close(noise[0].double(), expected, rtol=1e-4, atol=1e-5)
