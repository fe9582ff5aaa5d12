"""What pyproject.toml cannot say: examples and sample data, of the top folder, are in the wheel."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
SHARED = ("examples/**/*", "sample-data/*.py", "sample-data/tiny-*/*")  # as MANIFEST.in has them
TARGET = "async_grpo/share"


class WithSharedFiles(build_py):
    """Copies them into the package; an editable installation finds them where they are."""

    def run(self) -> None:
        super().run()
        for source, target in self._shared():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(target for _, target in self._shared())]

    def _shared(self) -> list[tuple[str, str]]:
        if self.editable_mode:
            return []
        found = {file for pattern in SHARED for file in HERE.glob(pattern) if file.is_file()}
        return [
            (str(file), str(Path(self.build_lib, TARGET, file.relative_to(HERE))))
            for file in sorted(found)
            if "__pycache__" not in file.parts
        ]


setup(cmdclass={"build_py": WithSharedFiles})
