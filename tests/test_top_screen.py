"""The screen of ``shoal top``, driven without a terminal."""

import asyncio
import socket
import threading

import pytest

from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.errors import ClosedError, NotConnectedError
from test_top import observed

textual = pytest.importorskip("textual", reason="Textual is an extra: pip install 'shoal[top]'")
from textual.widgets import DataTable, Sparkline, Static, TabbedContent  # noqa: E402

from shoal.cli.top_screen import TopScreen, sort_key  # noqa: E402

VIEW = observed(10.0, 12.0).view


def text_of(screen, name):
    return str(screen.query_one(f"#{name}", Static).content)


def rows_of(screen, number):
    table = screen.query_one(f"#table-{number}", DataTable)
    return [[str(cell) for cell in table.get_row_at(k)] for k in range(table.row_count)]


def drive(check, ask=lambda: VIEW, interval=3600.0, size=(120, 40), cancel=lambda: None):
    async def run():
        screen = TopScreen(ask, VIEW, interval, cancel)
        async with screen.run_test(size=size) as pilot:
            await pilot.pause()
            await check(screen, pilot)
        return screen

    return asyncio.run(run())


def test_the_summary_curves_and_tables_are_displayed():
    async def check(screen, pilot):
        assert "2 of 2 servers" in text_of(screen, "summary")
        assert "loss 0.5000" in text_of(screen, "summary")
        assert list(screen.query_one("#curve-keys_per_second", Sparkline).data) == [0, 500]
        assert "0.5000 to 0.5000" in text_of(screen, "name-loss")
        assert [row[0] for row in rows_of(screen, 0)] == ["0", "1"]
        assert rows_of(screen, 4)[0][:2] == ["18446744073709551615", "w:x"]
        assert "Hottest keys 2" in str(screen.query_one(TabbedContent).get_tab("tab-4").label)

    drive(check)


def test_the_table_is_sorted_by_the_column_of_the_cursor_and_stays_sorted():
    async def check(screen, pilot):
        screen.query_one("#table-0", DataTable).focus()
        await pilot.press("s")
        assert [row[0] for row in rows_of(screen, 0)] == ["1", "0"]
        screen.show(VIEW)
        assert [row[0] for row in rows_of(screen, 0)] == ["1", "0"]
        await pilot.press("s")
        assert [row[0] for row in rows_of(screen, 0)] == ["0", "1"]
        await pilot.press("right", "right", "right", "right", "right", "s")  # rows: 50 and 0
        assert [row[5] for row in rows_of(screen, 0)] == ["50", "0"]

    drive(check)


def test_numbers_are_sorted_by_their_size_with_their_unit():
    cells = ["0.0 s", "980 µs", "1.2 ms", "2.0 s", "-", "cut off"]
    assert sorted(set(cells), key=sort_key) == cells
    assert sorted(["1.1 G", "999", "10.0 k", "2.0 M"], key=sort_key) == ["999", "10.0 k", "2.0 M", "1.1 G"]


def test_a_view_that_fails_is_reported_until_the_next_one_comes():
    answers = [NotConnectedError("the scheduler does not answer"), VIEW | {"lost": "slots 0-7 are lost"}]
    asked = threading.Semaphore(0)

    def ask():
        asked.release()
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def check(screen, pilot):
        screen.refresh_view()
        await screen.workers.wait_for_complete()
        await pilot.pause()
        assert "does not answer" in text_of(screen, "trouble")
        assert screen.query_one("#trouble").display
        screen.refresh_view()
        await screen.workers.wait_for_complete()
        await pilot.pause()
        assert not screen.query_one("#trouble").display
        assert "broken: slots 0-7 are lost" in text_of(screen, "summary")

    assert drive(check, ask).view["lost"] == "slots 0-7 are lost"
    assert asked.acquire(blocking=False)
    assert asked.acquire(blocking=False)


def test_a_paused_screen_does_not_ask():
    async def check(screen, pilot):
        await pilot.press("p")
        assert "paused" in text_of(screen, "trouble")
        screen.refresh_view()
        assert not list(screen.workers)
        await pilot.press("p")
        assert not screen.query_one("#trouble").display

    def ask():
        raise AssertionError("asked")

    drive(check, ask)


def test_a_call_that_is_pending_at_the_end_is_cancelled_and_delays_nothing():
    asked, cancelled = threading.Event(), threading.Event()
    ended = []

    def ask():
        asked.set()
        ended.append(cancelled.wait(60.0))
        raise NotConnectedError("the connection to the scheduler was closed")

    async def check(screen, pilot):
        screen.refresh_view()
        await asyncio.to_thread(asked.wait, 60.0)
        await pilot.press("q")

    assert drive(check, ask, cancel=cancelled.set).view is VIEW  # the loop ends when its threads have
    assert ended == [True]


def test_the_screen_of_a_silent_scheduler_ends_with_its_client():
    with socket.socket() as silent:  # accepts nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = SchedulerClient(f"tcp://127.0.0.1:{silent.getsockname()[1]}", "observer")
        asked = threading.Event()
        ended = []

        def ask():
            asked.set()
            try:
                return client.view(timeout=60.0)
            except ClosedError as error:
                ended.append(str(error))
                raise

        async def check(screen, pilot):
            screen.refresh_view()
            await asyncio.to_thread(asked.wait, 60.0)
            await pilot.press("q")

        drive(check, ask, cancel=client.close)
        assert len(ended) == 1
        assert "was closed" in ended[0]


@pytest.mark.parametrize("size", [(40, 10), (200, 60)])
def test_it_is_dark_or_light_and_fits_any_terminal(size):
    async def check(screen, pilot):
        dark = screen.current_theme.dark
        await pilot.press("d")
        assert screen.current_theme.dark != dark
        await pilot.press("d")
        assert screen.current_theme.dark == dark
        await pilot.press("tab", "right", "right")
        await pilot.press("q")

    drive(check, size=size)


def test_names_with_brackets_are_text():
    async def check(screen, pilot):
        screen.show(
            VIEW | {"cluster": "[bold]x[/nonsense]", "tables": [{"name": "[/b]", "rows": 1, "memory_bytes": 1}]}
        )
        await pilot.pause()
        assert "[bold]x[/nonsense]" in text_of(screen, "summary")

    drive(check)
