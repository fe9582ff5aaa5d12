from types import SimpleNamespace

import pytest

from async_grpo.errors import WeightSyncError
from async_grpo.weight_sync.group import check_group


def test_a_group_that_would_send_nothing_is_refused():
    check_group(SimpleNamespace(disabled=False))
    for useless in (None, SimpleNamespace(disabled=True)):
        with pytest.raises(WeightSyncError, match="needs the NCCL library"):
            check_group(useless)
