"""The licences and the bill of materials of the installed package."""

import importlib.metadata
import json
import re

from paths import ROOT


def test_the_installed_package_has_the_licences_and_the_versions_of_what_it_contains():
    files = {str(file).split(".dist-info/")[-1]: file for file in importlib.metadata.files("shoal") or []}
    for name in ("pybind11", "Boost", "Cython", "LLVM", "Zig"):
        assert f"licenses/licenses/{name}.txt" in files
    bill = json.loads(files["sboms/shoal.cdx.json"].read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["version"] == importlib.metadata.version("shoal")
    names = {one["name"]: one["version"] for one in bill["components"]}
    assert {"pybind11", "Boost", "Cython"} <= set(names)
    assert all(re.fullmatch(r"\d+(\.\d+)+\S*", version) for version in names.values())
    assert bill["dependencies"][0]["dependsOn"] == [one["bom-ref"] for one in bill["components"]]


def test_the_licences_are_those_that_the_list_names():
    listed = set(re.findall(r"^\| `(\w+\.txt)`", (ROOT / "licenses" / "README.md").read_text(), re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "licenses").glob("*.txt")}
    assert (ROOT / "SECURITY.md").exists()
