"""What we rely on in other packages is found in their sources, and missed when it is gone."""

import pytest

from async_grpo.check.facts import (
    RELIED_ON,
    _broken,
    _unfit,
    broken_interfaces,
    unfit_packages,
)


def test_the_installed_packages_have_what_we_rely_on():
    assert broken_interfaces() == () and unfit_packages() == ()


def test_each_is_looked_for_where_it_is():
    packages = {package for package, _, _ in RELIED_ON}
    assert packages == {"ray", "torch", "vllm"}
    for key in RELIED_ON:  # a file that is not there tells of each
        package, _, name = key
        gone = {(package, "no/file.py", name): RELIED_ON[key]}
        assert [sentence.split(" in ")[0] for sentence in _broken(gone)] == [
            f"{package} must have {name}"
        ]


@pytest.mark.parametrize(
    ("key", "used", "missing"),
    [
        (("vllm", "vllm/v1/engine/async_llm.py", "AsyncLLM"), "pause", "AsyncLLM.pause"),
        (("vllm", "vllm/engine/arg_utils.py", "EngineArgs"), "no_field", "EngineArgs.no_field"),
        (("ray", "ray/_private/state.py", "actors"), "no_argument", "actors.no_argument"),
        (("ray", "ray/_private/state.py", "no_function"), "x", "no_function"),
    ],
)
def test_a_name_that_has_moved_is_told_with_its_file(key, used, missing):
    [sentence] = _broken({key: (used,)})
    assert sentence == f"{key[0]} must have {missing} in {key[1]}, the installed one has none"


def test_a_version_outside_its_range_is_told():
    assert list(_unfit(["click<1", "no-such-package>=2; extra == 'gpu'", "numpy"])) == [
        next(_unfit(["click<1"]))
    ]
    assert next(_unfit(["click<1"])).startswith("click must be <1, got ")
    assert list(_unfit(["no-such-package"])) == ["no-such-package must be installed, it is not"]
