"""The memory of chunked log-probabilities, as the kernel saw it."""

import pytest

from benchmarks.gpu import heads, isolation

TOKENS, VOCABULARY, CHUNK = 4096, 16_000, 128


def extra_bytes():
    heads.run(heads.WAYS["chunks of 128"], inputs(8))  # libraries set up what they keep
    return heads.extra_bytes("chunks of 128", inputs(TOKENS))


def inputs(num_tokens):
    return heads.make_inputs(num_tokens, hidden_size=16, vocabulary=VOCABULARY)


@pytest.mark.integration  # a process of its own
def test_memory_is_that_of_a_few_chunks_whatever_the_number_of_tokens():
    """glibc may take a chunk's tensors from its heap: what is left between them counts too."""
    one_chunk = 4 * CHUNK * VOCABULARY
    assert one_chunk < isolation.ask(extra_bytes) < 14 * one_chunk  # all tokens: 32 of them
