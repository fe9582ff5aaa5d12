"""`python -m async_grpo.cli.local_torchrun`: torchrun whose stores listen on this machine only.

For ranks on one machine, with `--standalone` or `--master-addr 127.0.0.1`; options as torchrun's.
"""

from __future__ import annotations

from async_grpo.loopback import keep_stores_to_loopback


def main() -> None:
    """As torchrun."""
    keep_stores_to_loopback()
    from torch.distributed.run import main as torchrun  # after its stores were replaced

    torchrun()


if __name__ == "__main__":
    main()
