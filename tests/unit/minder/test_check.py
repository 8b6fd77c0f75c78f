"""What a program of ours asks the monitor: one job, until something is found."""

import pytest

from planish import store
from planish.base.errors import ConfigError
from planish.minder.check import find, watch
from planish.minder.service.config import service_settings
from planish.records import layout
from planish.store.documents import write_json


def settings_of(port, *names, machines=("a", "b", "c", "d")):
    jobs = [{"name": name, "machines": list(machines)} for name in names]
    return {
        "prometheus": {"url": f"http://127.0.0.1:{port}"},
        "detect": {"metrics": ["cpu_usage"]},
        "denoise": {"denoiser": "none"},
        "jobs": jobs,
    }


def test_looking_goes_on_until_the_update_is_written(file_root, closed_port):
    done = layout.update(file_root, 3)
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            write_json(done, {})

    watched = watch(
        settings_of(closed_port, "pretrain"),
        "pretrain",
        own_stage="monitor_check",
        seconds=1000.0,
        is_over=lambda: store.exists(done),
        sleep=sleep,
    )
    assert pauses == [60, 60]
    assert (watched.result.status, watched.num_calls, watched.num_failed) == ("skipped", 3, 3)


def test_a_job_of_one_machine_is_told_once_to_have_nothing_to_compare(closed_port, caplog):
    pauses = []
    watched = watch(
        settings_of(closed_port, "train", machines=["a"]),
        "train",
        own_stage="monitor_check",
        seconds=1000.0,
        is_over=lambda: len(pauses) == 3,
        sleep=pauses.append,
    )
    assert (watched.result.status, watched.result.n_machines) == ("too_few_machines", 1)
    assert (watched.num_calls, watched.num_failed) == (4, 0)
    assert caplog.messages == ["nothing to compare job=train machines=1 least=4"]


def test_without_a_name_there_must_be_one_job(closed_port):
    one = service_settings(settings_of(closed_port, "one"))
    assert find(one, "", "monitor_check").name == "one"
    with pytest.raises(ConfigError, match=r"`job` must be named .* got \['one', 'two'\]"):
        find(service_settings(settings_of(closed_port, "one", "two")), "", "monitor_check")
