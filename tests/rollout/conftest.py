"""Model folders small enough to start an engine in seconds."""

import pytest
from tiny_models import make_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_model_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("untied"), tied=False)
