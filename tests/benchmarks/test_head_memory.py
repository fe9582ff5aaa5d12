"""The memory of chunked log-probabilities, as the kernel saw it.

Seen to fail: statistics of all chunks kept in a list and joined, and a chunk's gradient alive while
the next one is made (in a copy of `model/logprobs.py`: the heap in fragments, 82 chunks).
"""

import pytest

from benchmarks.head_memory import measure

TOKENS, VOCAB, CHUNK = 2048, 32_000, 64


@pytest.mark.integration  # a process of its own
def test_memory_is_that_of_a_few_chunks_whatever_the_number_of_tokens():
    """Tensors of 8 MB, which glibc takes from its heap: what is left between them counts too."""
    one_chunk = 4 * CHUNK * VOCAB
    peaks = measure(CHUNK, num_tokens=TOKENS, vocab_size=VOCAB, hidden_size=16)
    assert one_chunk < peaks.forward < 14 * one_chunk  # with what libraries keep; in all it is 32
    assert peaks.backward < 14 * one_chunk
