"""A Ray of a test file's own, which ends with it."""

import contextlib
import os
import tempfile

import ray


@contextlib.contextmanager
def local_ray(*, num_cpus, object_store_mib=100, **options):
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # a process a CPU, 0.8 s each
    with tempfile.TemporaryDirectory(prefix="r-") as folder:  # short: paths of sockets are limited
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=object_store_mib << 20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            **options,
        )
        try:
            yield ray
        finally:
            ray.shutdown()
