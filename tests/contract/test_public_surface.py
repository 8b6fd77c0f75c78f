"""Nothing that others rely on changes unasked; `make golden` writes the files anew."""

import pytest

from tests.golden.write_configuration import PAGE, PODS, page, profiles
from tests.golden.write_surface import FOLDER, SURFACES


@pytest.mark.parametrize("name", SURFACES)
def test_the_surface_is_the_one_on_file(name):
    assert SURFACES[name]().splitlines() == (FOLDER / name).read_text().splitlines()


def test_there_is_no_other_file_of_the_surface():
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(SURFACES)


def test_the_page_of_all_settings_is_the_one_on_file():
    assert page().splitlines() == PAGE.read_text("utf-8").splitlines()


def test_the_package_knows_the_pods_of_each_profile():
    assert profiles() == PODS.read_text("utf-8")
