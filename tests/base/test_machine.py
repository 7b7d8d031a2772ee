"""The resources of the machine."""

import tempfile

import pytest

from shoal.base.machine import temporary_root
from shoal.models import EarlyStopping, LogisticRegression

DATA = ([[1.0], [0.0]], [1, 0])


def test_a_missing_directory_for_temporary_files_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nonexistent"])
    said = (
        r"No usable temporary directory found in \['/nonexistent'\]: set TMPDIR to a directory that this user can write"
    )
    with pytest.raises(FileNotFoundError, match=said):
        temporary_root()
    with LogisticRegression() as model, pytest.raises(FileNotFoundError, match=said):
        model.fit(*DATA, valid=DATA, early_stopping=EarlyStopping(1), progress=False)
