"""What the prediction server decodes: every form of an instance is the example that the model learned from."""

from __future__ import annotations

import csv
import io
import json
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shoal
from shoal import cli
from shoal.data.readers import NAMED_FORMATS, READERS
from tiers import rounds

pa = pytest.importorskip("pyarrow")

from shoal.serve import ServedModel  # noqa: E402
from shoal.serve.bodies import ARROW, JSON, examples  # noqa: E402
from shoal.serve.inputs import InputSpec  # noqa: E402
from shoal.serve.limits import Account, Budget, Limits, RequestError, TooLargeError  # noqa: E402

TEXT = "text/plain"


class Asked:
    """A model and what it takes, without a server."""

    def __init__(self, model, **limits):
        self.model = model
        self.spec = InputSpec(model)
        self.limits = Limits(**limits)

    def predict(self, body, kind=JSON):
        with Account(Budget(self.limits)) as account:
            batch = examples(body, kind, self.spec, account)
            return self.model.probabilities(batch)

    def instances(self, rows):
        return self.predict(json.dumps({"instances": rows}).encode())

    def table(self, table):
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return self.predict(sink.getvalue(), ARROW)


SITES = ["a", "b", "c d", 'q"uote', "x,y", "5", "true", "0.5", "é"]
HOW = {
    "label": "click",
    "categorical": ["site", "user"],
    "numeric": ["price", "age"],
    "lists": {"seen": "site"},
    "vectors": ["dwell"],
    "interactions": [("site", "user"), ("user", "price")],
}


def log_lines(rng, n=300):
    lines = ["click,site,price,user,seen,age,dwell"]
    for _ in range(n):
        site, *seen = rng.choice(SITES, 1 + rng.integers(3))
        price, dwell = rng.choice(["", "0.5", "2", "-1.25"]), "|".join(rng.choice(["", "0.5", "3"], rng.integers(4)))
        cells = [rng.integers(2), site, price, rng.integers(9), "|".join(seen), 3, dwell]
        out = io.StringIO()
        csv.writer(out, lineterminator="").writerow(cells)
        lines.append(out.getvalue())
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module", params=["named", "all"])
def columns_model(request, tmp_path_factory):
    """A model of csv, and how its data is read: with all columns named, or all others being categorical."""
    path = tmp_path_factory.mktemp("log") / "log.csv"
    path.write_text(log_lines(np.random.default_rng(1)))
    how = HOW if request.param == "named" else {**HOW, "categorical": None, "interactions": [("site", "user")]}
    with shoal.LogisticRegression(optimizer=shoal.Adagrad(lr=0.5)) as model:
        model.fit(shoal.read_csv(path, **how), progress=False)
        yield Asked(model), how, path.with_name("asked.csv")


def text_of(cell):
    """What a cell of JSON is in a csv file."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return "|".join(map(text_of, cell)) if isinstance(cell, list) else str(cell)


CELL = st.one_of(
    st.sampled_from(SITES), st.integers(0, 9), st.booleans(), st.none(), st.just("NA"), st.just(""),
    st.sampled_from([0.5, 17.0, -2.25]),
)  # fmt: skip
NUMBER = st.one_of(st.sampled_from([0.5, 2, -1.25, "2", " 0.5 ", None, "", "NA", True]), st.integers(-5, 5))
INSTANCE = st.fixed_dictionaries(
    {},
    optional={
        "site": CELL,
        "user": CELL,
        "price": NUMBER | st.just("many"),
        "age": NUMBER,
        "seen": st.lists(CELL, max_size=3) | st.none(),
        "dwell": st.lists(NUMBER, max_size=3) | st.none(),
        "click": st.just(1),
    },
)


@pytest.mark.slow
@settings(max_examples=rounds(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(INSTANCE, min_size=1, max_size=6))
def test_every_instance_gets_the_models_own_probability_whatever_stands_beside_it(columns_model, rows):
    asked, how, path = columns_model
    bad = next((i for i, row in enumerate(rows) if row.get("price") == "many"), None)
    if bad is not None:
        with pytest.raises(RequestError, match=f"instance {bad}, column 'price': 'many' is not a number"):
            asked.instances(rows)
        return
    names = ["click", "site", "price", "user", "seen", "age", "dwell"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            truth = {name: "1" if cell is True and name in ("price", "age") else text_of(cell)
                     for name, cell in row.items()}  # fmt: skip
            truth["dwell"] = text_of([1 if cell is True else cell for cell in row.get("dwell") or ()])
            writer.writerow(["1", *(truth.get(name, "") for name in names[1:])])
    want = asked.model.probabilities(shoal.read_csv(path, **how))
    np.testing.assert_allclose(asked.instances(rows), want, rtol=1e-6)
    ordered = [{name: row[name] for name in names if name in row} for row in rows]
    np.testing.assert_array_equal(asked.instances(ordered), want)


def test_an_instance_without_a_column_does_not_hide_the_column_of_others(columns_model):
    asked, *_ = columns_model
    full = {"site": "b", "user": 3, "price": 2}
    alone = asked.instances([full])[0]
    assert asked.instances([{"price": 0.5}, full])[1] == alone
    assert asked.instances([{}, full, {}])[1] == alone
    assert asked.instances([{"keys": [1]}, full, {"keys": []}])[1] == alone
    assert asked.instances([{}])[0] == asked.instances([{"keys": []}])[0]


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        ({"site": ["a"]}, "instance 1, column 'site': a list"),
        ({"site": {"a": 1}}, "instance 1, column 'site': an object is not a cell"),
        ({"price": [1]}, "instance 1, column 'price': a list"),
        ({"price": 1e39}, "instance 1, column 'price': 1e\\+39 is not finite as float32"),
        ({"price": "0x1"}, "instance 1, column 'price': '0x1' is not a number"),
        ({"seen": "a|b"}, "instance 1, column 'seen': 'a|b' is not a list"),
        ({"seen": [["a"]]}, "instance 1, column 'seen': a list"),
        ({"dwell": "1|2"}, "instance 1, column 'dwell': '1|2' is not a list"),
        ({"dwell": [1, [2]]}, "instance 1, column 'dwell': a list"),
        ({"dwell": [1, "x"]}, "instance 1, column 'dwell': 'x' is not a number"),
        ({"dwell": [4e38]}, "instance 1, column 'dwell': 4e\\+38 is not finite as float32"),
        ({"keys": ["a"]}, "instance 1: 'a' is not a key"),
        ({"keys": [1], "site": "a"}, "instance 1: 'site' stands beside keys"),
        (7, "instance 1: an instance is an object or a line of text"),
        ("a,b", "instance 1: a line of text, 'a,b': this model learned from csv: send columns by name"),
    ],
)
def test_a_cell_that_cannot_be_taken_is_named(columns_model, instance, message):
    with pytest.raises(RequestError, match=message.replace("|", "\\|")):
        columns_model[0].instances([{}, instance])


def test_arrow_bodies_have_missing_texts_and_views(columns_model):
    asked, *_ = columns_model
    rows = [
        {"site": "b", "user": "3", "price": 2.0, "seen": ["a", "NA"], "dwell": [0.5, None, 3]},
        {"site": "NA", "user": None, "dwell": []},
        {"age": 3},
    ]
    want = asked.instances(rows)
    table = pa.Table.from_pylist(rows, pa.schema({"site": pa.string(), "user": pa.string(), "price": pa.float32(),
                                                  "seen": pa.list_(pa.string()), "age": pa.int8(),
                                                  "dwell": pa.list_(pa.float64())}))  # fmt: skip
    np.testing.assert_array_equal(asked.table(table), want)
    views = table.set_column(0, "site", table["site"].cast(pa.string_view()))
    np.testing.assert_array_equal(asked.table(views), want)
    coded = table.set_column(0, "site", table["site"].dictionary_encode())
    np.testing.assert_array_equal(asked.table(pa.concat_tables([coded.slice(2), coded.slice(0, 1)])), want[[2, 0]])
    with pytest.raises(RequestError, match=r"column '(site|price)' is not there: the columns are 'user'"):
        asked.table(table.select(["user"]))
    bad = table.set_column(2, "price", pa.array(["2", None, "many"]))
    with pytest.raises(RequestError, match="instance 2, column 'price': 'many' is not a number"):
        asked.table(bad)
    with pytest.raises(RequestError, match="column 'seen' holds string: this model takes lists"):
        asked.table(table.set_column(3, "seen", pa.array(["a"] * 3)))
    with pytest.raises(RequestError, match="column 'dwell' holds double: this model takes lists"):
        asked.table(table.set_column(5, "dwell", pa.array([1.0] * 3)))
    with pytest.raises(RequestError, match="instance 1, column 'dwell': inf is not a finite float32 number"):
        asked.table(table.set_column(5, "dwell", pa.array([[1.0], [2.0, np.inf], None])))


def text_models():
    rng = np.random.default_rng(3)
    rows = [rng.choice(40, 3, replace=False) for _ in range(200)]
    labels = rng.integers(0, 2, 200)
    cells = [["" if rng.random() < 0.2 else str(rng.integers(-2, 500)) for _ in range(13)]
             + ["" if rng.random() < 0.2 else f"{rng.integers(9):08x}" for _ in range(26)] for _ in rows]  # fmt: skip
    lines = {
        "libsvm": [f"{y} " + " ".join(f"{k}:0.5" for k in row) for y, row in zip(labels, rows, strict=True)],
        "libffm": [
            f"{y} " + " ".join(f"{f}:{k}:2" for f, k in enumerate(r)) for y, r in zip(labels, rows, strict=True)
        ],
        "vw": [f"{y} |user u{a} |item i{b}:0.5 c{c}" for y, (a, b, c) in zip(labels, rows, strict=True)],
        "criteo": ["\t".join([str(y), *row]) for y, row in zip(labels, cells, strict=True)],
    }
    crossed = {"libffm": [(0, 1)], "vw": [("user", "item")], "criteo": [("I1", "C2")]}
    return [(form, some, crossed.get(form)) for form, some in lines.items()]


def test_models_of_every_format_of_lines_are_asked():
    assert {form for form, _, _ in text_models()} == READERS.keys() - NAMED_FORMATS


@pytest.mark.parametrize(
    ("form", "lines", "crossed"), text_models(), ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_model_of_text_is_asked_by_lines_with_labels_and_without(tmp_path, form, lines, crossed):
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    read = getattr(shoal, f"read_{form}")
    how = {"interactions": crossed} if crossed else {}
    with shoal.LogisticRegression(optimizer=shoal.Adagrad(lr=0.5)) as model:
        model.fit(read(tmp_path / "log", **how), progress=False)
        want = model.probabilities(read(tmp_path / "log", **how))
        asked = Asked(model)
        assert asked.spec.describe()["lines"] == f"{form}, with or without a label"
        np.testing.assert_array_equal(asked.instances(lines), want)
        bare = [line.partition("\t" if form == "criteo" else " ")[2] for line in lines]
        np.testing.assert_array_equal(asked.instances(bare), want)
        mixed = [one for pair in zip(lines, bare, strict=True) for one in (pair[0], {"keys": []}, pair[1])]
        np.testing.assert_array_equal(asked.instances(mixed)[::3], want)
        np.testing.assert_array_equal(asked.predict("\r\n".join(lines).encode(), TEXT), want)
        np.testing.assert_array_equal(asked.predict(("\n".join(bare) + "\n").encode(), TEXT), want)
        worse = {"libsvm": "1 a:1", "libffm": "1 1:1", "vw": "no bar", "criteo": lines[0].replace("\t", "\tx", 1)}[form]
        for wrong in (worse, "1 1:1\n1 2:1"):
            with pytest.raises(RequestError, match="instance 2"):
                asked.instances([lines[0], lines[1], wrong])
        with pytest.raises(RequestError, match="send lines of" if form != "criteo" else "column 'site': no column of"):
            asked.instances([{"site": "a"}])


def test_a_model_of_criteos_logs_is_asked_by_names_and_numbers_of_columns(tmp_path):
    lines = text_models()[3][1]
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    with shoal.LogisticRegression(optimizer=shoal.Adagrad(lr=0.5)) as model:
        model.fit(shoal.read_criteo(tmp_path / "log"), progress=False)
        want = model.probabilities(shoal.read_criteo(tmp_path / "log"))
        asked = Asked(model)
        names = [*(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
        cells = [line.split("\t")[1:] for line in lines]
        rows = [dict(zip(names, row, strict=True)) for row in cells]
        np.testing.assert_array_equal(asked.instances(rows), want)
        numbered = [{str(i): cell for i, cell in enumerate(row, 1) if cell} for row in cells]
        np.testing.assert_array_equal(asked.instances(numbered), want)
        whole = [{n: int(c) if n[0] == "I" and c else c or None for n, c in row.items()} for row in rows]
        np.testing.assert_array_equal(asked.instances([{"label": 1, **row} for row in reversed(whole)])[::-1], want)
        for cell, message in (
            ({"I1": "a"}, "column 'I1': 'a' is not a whole number"),
            ({"I1": 0.5}, "column 'I1': 0.5 is not a cell"),
            ({"I2": 2**63}, "column 'I2': 9223372036854775808 is not a whole number below"),
            ({"C1": "a\tb"}, "column 'C1': .* has a tab"),
            ({"C1": True}, "column 'C1': true is not a cell"),
            ({"C27": "a"}, "column 'C27': no column of Criteo's logs"),
            ({"C1": "a", "14": "b"}, "column '14': it is there twice"),
        ):
            with pytest.raises(RequestError, match=f"instance 1, {message}"):
                asked.instances([{}, cell])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["criteo", "libffm", "vw"])
def test_a_click_model_of_text_is_asked_by_every_form(tmp_path, form):
    pytest.importorskip("torch")
    from shoal.torch import config

    lines = {name: some for name, some, _ in text_models()}[form]
    if form == "vw":
        lines = [line.rpartition(" ")[0] for line in lines]  # one feature of each namespace
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    fields = {"criteo": [], "libffm": ["0", "1", "2"], "vw": ["user", "item"]}[form]
    (tmp_path / "ctr.toml").write_text(
        f"""
[data]
data = ["{tmp_path / "log"}"]
format = "{form}"
fields = {json.dumps(fields)}
[model]
name = "deepfm"
dim = 4
hidden = [8]
[output]
output = "{tmp_path / "m"}"
"""
    )
    assert cli.main(["train", "ctr", "--config", str(tmp_path / "ctr.toml"), "--quiet"]) == 0
    assert cli.main(["export", str(tmp_path / "m"), "--output", str(tmp_path / "e"), "--quiet"]) == 0
    with config.load(tmp_path / "m") as model:
        (batch,) = getattr(shoal, f"read_{form}")(tmp_path / "log").with_fields()
        want = model.probabilities(batch)
    with ServedModel(tmp_path / "e") as served:
        asked = Asked(served.now.predictor)
        np.testing.assert_allclose(asked.instances(lines), want, rtol=1e-5)
        np.testing.assert_allclose(asked.predict("\n".join(lines).encode(), TEXT), want, rtol=1e-5)
        rows = [slice(a, b) for a, b in zip(batch.indptr[:-1], batch.indptr[1:], strict=True)]
        named = [["user", "item"] if form == "vw" else batch.fields[row].tolist() for row in rows]
        values = [[1.0] * (r.stop - r.start) if batch.values is None else batch.values[r].tolist() for r in rows]
        sparse = [{"keys": batch.keys[row].tolist(), "values": value, "fields": names}
                  for row, value, names in zip(rows, values, named, strict=True)]  # fmt: skip
        np.testing.assert_allclose(asked.instances(sparse), want, rtol=1e-5)
        table = pa.table(
            {
                "keys": pa.array([row["keys"] for row in sparse], pa.list_(pa.uint64())),
                "values": pa.array(values, pa.list_(pa.float32())),
                "fields": pa.array([batch.fields[row].tolist() for row in rows], pa.list_(pa.uint64())),
            }
        )
        np.testing.assert_allclose(asked.table(table), want, rtol=1e-5)
        if form == "criteo":
            names = asked.spec.named()
            cells = [dict(zip(names, line.split("\t")[1:], strict=True)) for line in lines]
            np.testing.assert_allclose(asked.instances(cells), want, rtol=1e-5)
        with pytest.raises(RequestError, match=f'learned from {form}: send .*"fields"'):
            asked.instances([{"keys": [1]}])
        if form != "vw":  # where every text is a namespace
            with pytest.raises(RequestError, match="instance 0: -7 is not a field"):
                asked.instances([{"keys": [1, 2], "fields": [-7, -7]}])


# ---- rows of csv -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_csv(tmp_path_factory):
    """A model of csv with a text, a number, a list and quotes, and one of a file without a header."""
    folder = tmp_path_factory.mktemp("csv")
    rng = np.random.default_rng(3)
    sites = ["a.com", '"b, or ""c"""', "NA", ""]
    lines = [
        f"{rng.integers(2)};{sites[rng.integers(4)]};{rng.random():.3f};{'|'.join(map(str, rng.integers(0, 5, k)))}"
        for k in rng.integers(0, 4, 80)
    ]
    names = ["click", "site", "price", "seen"]
    (folder / "named.csv").write_text("\n".join([";".join(names), *lines]) + "\n")
    (folder / "bare.csv").write_text("\n".join(lines) + "\n")
    how = {"label": "click", "categorical": ["site"], "numeric": ["price"], "lists": {"seen": "seen"}, "sep": ";"}
    found = {}
    for name, more in (("named", {}), ("bare", {"columns": names})):
        reader = shoal.read_csv(folder / f"{name}.csv", **how, **more)
        with shoal.LogisticRegression() as model:
            model.fit(reader, progress=False)
            model.save(folder / name)
            found[name] = InputSpec(model), lambda batch, name=name: shoal.load(folder / name).probabilities(batch)
            found[name] += (model.probabilities(reader),)
    return folder, found


def asked_csv(spec, body):
    with Account(Budget(Limits())) as account:
        return examples(body, "text/csv; charset=utf-8", spec, account)


@pytest.mark.parametrize("name", ["named", "bare"])
def test_rows_of_csv_predict_as_the_files_that_were_trained_on(of_csv, name):
    folder, found = of_csv
    spec, predict, want = found[name]
    body = (folder / f"{name}.csv").read_bytes()
    assert predict(asked_csv(spec, body)).tolist() == want.tolist()
    unlabelled = b"\n".join(line.partition(b";")[2] for line in body.splitlines())
    assert predict(asked_csv(spec, unlabelled)).tolist() == want.tolist()
    assert "csv" in spec.describe()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("site;price;seen\n", "no instances: send at least one row below the header"),
        ("", "column 'site' is not there"),
        ("site;price\na;1\n", "column 'seen' is not there: the columns are 'site', 'price'"),
        ("site;price;seen\na;1;\nb\n", "instance 1: there are more or fewer cells than columns"),
        ("site;price;seen\n\na;;\nb;many;\n", "instance 1, column 'price': a value is not a finite decimal number at"),
        ('site;price;seen\n"a;1;\n', "instance 0: a cell in quotes has no closing quote on its line"),
        ("site;price;seen\ra;1;\rb;2;\r", "a carriage return (CR) stands within the first line"),
        (";".join(f"c{i}" for i in range(10_001)), "10001 columns: at most 10000 are accepted"),
    ],
)
def test_rows_of_csv_that_cannot_be_used_are_refused_with_words(of_csv, body, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        asked_csv(of_csv[1]["named"][0], body.encode())


def test_a_body_of_csv_has_a_bounded_memory(of_csv):
    body = b"site;price;seen\n" + b"a;1;\n" * 1000
    with Account(Budget(Limits(decoded_bytes=100_000))) as account, pytest.raises(TooLargeError):
        examples(body, "text/csv", of_csv[1]["named"][0], account)
