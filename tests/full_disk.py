"""A disk that is full, as far as this process can make one without being root."""

import resource
from contextlib import contextmanager


@contextmanager
def no_file_beyond(num_bytes):
    """Writes beyond so many bytes of a file are refused, after a part of them was taken."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
