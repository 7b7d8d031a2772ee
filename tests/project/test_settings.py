"""Configurations: what their constructors, files and JSON accept, and what an error says."""

import re
import tomllib
from typing import Annotated, Literal

import msgspec
import pytest

import settings_page
from shoal.base.settings import Config, Setting, fields, read, to_toml
from shoal.config import ClusterConfig, ConnectConfig, Feature, SchedulerConfig, ServerConfig, Task, TrainConfig
from shoal.consistency import ASP, BSP, SSP, as_consistency, parse_consistency


class Reader(Config, frozen=True, kw_only=True):
    """How files are read."""

    threads: Annotated[int, "threads that parse", Setting(ge=1)] = 1
    share: Annotated[float, Setting("share of the examples", gt=0, le=1)] = 1.0
    on_error: Annotated[Literal["raise", "skip"], Setting("what becomes of a malformed line")] = "raise"
    columns: Annotated[tuple[str, ...], Setting("names of columns")] = ()


class Job(Config, frozen=True, kw_only=True):
    """A job."""

    output: Annotated[str, Setting("directory of the model")]
    resume: Annotated[bool, Setting("continue", in_file=False)] = False
    reader: Reader = Reader()


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"threads": 0}, ValueError, "threads is 0: pass 1 or more"),
        ({"threads": 1.5}, TypeError, "threads is 1.5: pass a whole number, 1 or more"),
        ({"threads": True}, TypeError, "threads is True: pass a whole number, 1 or more"),
        ({"share": 0}, ValueError, "share is 0.0: pass a number above 0, at most 1"),
        ({"share": 1.5}, ValueError, "share is 1.5: pass a number above 0, at most 1"),
        ({"share": float("nan")}, ValueError, "share is nan: pass a number above 0, at most 1"),
        ({"on_error": "skp"}, ValueError, "on_error is 'skp': did you mean 'skip'? It is one of raise, skip"),
        ({"columns": "a"}, TypeError, "columns is 'a': pass a list"),
    ],
)
def test_a_constructor_names_the_value_that_is_wrong_and_what_to_pass(given, error, says):
    with pytest.raises(error) as raised:
        Reader(**given)
    assert str(raised.value) == says


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"output": "m", "reader": {"thread": 2}}, "[reader] has no key 'thread': did you mean 'threads'? There are "),
        ({"output": "m", "reader": {"threads": 0}}, "[reader] threads is 0: pass 1 or more"),
        ({"output": "m", "reader": {"threads": "2"}}, "[reader] threads is '2': pass a whole number, 1 or more"),
        ({"output": "m", "reader": 2}, "[reader] is 2: it must be a section"),
        ({"reader": {}}, "the configuration has no output: directory of the model"),
    ],
)
def test_a_file_is_refused_with_the_section_and_the_nearest_key(given, says):
    with pytest.raises(ValueError, match="^" + re.escape(says)):
        read(Job, given)


def test_values_are_kept_in_the_type_of_their_field(tmp_path):
    reader = Reader(share=1, columns=["a", "b"])
    assert (reader.share, type(reader.share), reader.columns) == (1.0, float, ("a", "b"))
    assert SchedulerConfig(bind="tcp://a:1", journal=tmp_path).journal == str(tmp_path)
    for port in (9100, "0.0.0.0:9100"):
        assert SchedulerConfig(bind="tcp://a:1", metrics_port=port).metrics_port == port


def test_toml_has_every_setting_of_a_file_and_gives_the_same_configuration():
    job = Job(output='a "quoted" é', resume=True, reader=Reader(columns=["a", "b"], share=0.5))
    text = to_toml(job)
    assert "resume" not in text
    assert "on_error" in text
    assert read(Job, tomllib.loads(text) | {"resume": True}) == job


@pytest.mark.parametrize(
    "config",
    [
        SchedulerConfig(bind="tcp://127.0.0.1:*", servers=3, replicas=1, copy_rate="50MiB", grace=5),
        ServerConfig(
            scheduler="tcp://10.0.0.1:5570",
            tier="/mnt/nvme:8GiB",
            storage_roots=["/models"],
            storage_options={"endpoint_url": "http://minio:9000"},
            allow_code=["source"],
        ),
        ConnectConfig(cluster="", consistency="SSP:2", workers="2:8", cache="100:1", filters="zeros,threshold=0.1"),
    ],
)
def test_a_child_gets_the_configuration_of_its_launcher_as_one_object(config):
    assert msgspec.json.decode(msgspec.json.encode(config), type=type(config)) == config


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (ClusterConfig, {"copy_rate": "fast"}, "copy_rate: 'fast' is not a size"),
        (ConnectConfig, {"consistency": "bps"}, "consistency: 'bps' is not a consistency: write bsp, bsp:mean, ssp:N"),
        (ConnectConfig, {"workers": "4:2"}, "workers: '4:2' is not a number of workers"),
        (ConnectConfig, {"workers": 0}, "workers is 0: pass 1 or more"),
        (ConnectConfig, {"cache": "8"}, "cache: '8' is not ROWS:STALENESS"),
        (ConnectConfig, {"filters": "zeroes"}, "filters: 'zeroes' is not a filter"),
        (ConnectConfig, {"filters": "zeros,zeros"}, "names zeros twice"),
    ],
)
def test_text_that_is_no_rule_is_refused_where_it_is_given(kind, given, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        kind(**given)


def test_a_consistency_has_one_spelling_in_any_case():
    assert (as_consistency("Ssp:2"), as_consistency(ASP())) == (SSP(2), ASP())
    with pytest.raises(TypeError, match="consistency is one of"):
        as_consistency(2)
    assert [parse_consistency(text) for text in ("bsp", "BSP", "SSP:2", "ssp:2", "asp", "Asp")] == [
        BSP(),
        BSP(),
        SSP(2),
        SSP(2),
        ASP(),
        ASP(),
    ]


def test_a_server_has_one_bound_of_its_memory():
    with pytest.raises(ValueError, match="a memory budget or a tier"):
        ServerConfig(scheduler="tcp://a:1", memory="8GiB", tier="/mnt:8GiB")
    with pytest.raises(ValueError, match="pass one of them"):
        ServerConfig(scheduler="tcp://a:1", memory="8GiB", slot_memory="1MiB")


def test_the_page_of_all_settings_is_current():
    assert settings_page.PAGE.read_text() == settings_page.page(), "run python tools/settings_page.py"


@pytest.mark.parametrize("kind", [Feature, Task])
def test_the_page_has_the_settings_within_sections(kind):
    assert settings_page.table(kind, files=True) in settings_page.PAGE.read_text()


@pytest.mark.parametrize("kind", [SchedulerConfig, ServerConfig, ConnectConfig, TrainConfig])
def test_every_setting_is_one_sentence_without_its_full_stop(kind):
    sections = [field.section for field in fields(kind) if field.section is not None]
    for field in (field for one in (kind, *sections) for field in fields(one) if field.section is None):
        assert field.setting.text
        assert not field.setting.text.removesuffix("...").endswith(".")
