"""The model cache in a real browser: its three stores, what a broken-off download leaves, several tabs, and storage that is full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from tests.web.bundles import bundle
from tests.web.range_server import Served, serve

HERE = Path(__file__).parent
MB = 1_000_000

# `at`: bytes of the download at which to "cancel" it or to "kill" its worker. The worker stays for later.
OPEN = """(job) => new Promise((resolve) => {
  const worker = new Worker('/model.worker.js', {type: 'module'});
  globalThis.last = {worker, progress: null};
  worker.onmessage = ({data: {progress, done}}) => {
    if (done) return resolve(done);
    last.progress = progress;
    if (!job.at || progress.stage !== 'download' || progress.done < job.at) return;
    job.at = 0;
    if (job.how === 'cancel') worker.postMessage('cancel');
    else { worker.terminate(); resolve({killed: progress.done}); }
  };
  worker.postMessage(job);
})"""
FOLDER = "(await navigator.storage.getDirectory()).getDirectoryHandle('pie-models')"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("bundle")
    bundle(HERE / "model.worker.ts", folder)
    with serve(folder) as found:
        yield found


@pytest.fixture(scope="module")
def context(browser: Browser, served: Served) -> Iterator[BrowserContext]:
    opened = browser.new_context()
    yield opened
    opened.close()


@pytest.fixture
def page(context: BrowserContext, served: Served) -> Iterator[Page]:
    page = context.new_page()
    page.goto(served.origin)
    yield page
    page.close()


def job(served: Served, **more: Any) -> dict[str, Any]:
    return {"url": f"{served.origin}/m/manifest.json", **more}


def opened(page: Page, served: Served, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(OPEN, job(served, **more))
    return found


def kept(page: Page) -> set[str]:
    """The kinds of files in the store of this sha256's first six digits, such as "1f2e3d.part"."""
    names = page.evaluate(
        f"(async () => {{ const names = []; for await (const name of (await {FOLDER}).keys()) names.push(name); return names }})()"
    )
    return {name[:6] + name[64:] for name in names}


def damage(page: Page, name: str, change: str) -> None:
    """Write into a stored file behind the cache's back."""
    page.evaluate(
        f"(async () => {{ const file = await (await {FOLDER}).getFileHandle('{name}');"
        f" const out = await file.createWritable({{keepExistingData: true}}); await out.{change}; await out.close() }})()"
    )


def test_a_second_visit_reads_what_the_first_stored_also_beside_another_reader(page: Page, served: Served) -> None:
    served.new(3 * MB)
    first = opened(page, served)
    assert first == {"kind": "HandleSource", "sha256": served.sha256, "stages": ["download"]}
    second = opened(page, served)
    assert second == {"kind": "HandleSource", "sha256": served.sha256, "stages": []}
    assert served.asked == [None]
    assert f"{served.sha256[:6]}.part" not in kept(page)


@pytest.mark.parametrize("how", ["cancel", "kill"])
def test_what_came_before_a_download_broke_off_is_kept(page: Page, served: Served, how: str) -> None:
    served.new(12 * MB, rate=12 * MB)
    broken = opened(page, served, at=4 * MB, how=how)
    assert "killed" in broken or broken["error"] == "Cancelled"
    served.rate = None
    whole = opened(page, served)
    stages = [stage for stage in whole["stages"] if stage != "waiting"]  # a lock may outlive its worker for a moment
    assert whole["sha256"] == served.sha256 and stages == ["verify", "download"]
    assert served.asked[0] is None and int(str(served.asked[1])[6:-1]) >= 4 * MB


def test_a_damaged_part_costs_a_second_download(page: Page, served: Served) -> None:
    served.new(8 * MB, rate=8 * MB)
    opened(page, served, at=3 * MB, how="cancel")
    damage(page, f"{served.sha256}.part", "write({type: 'write', position: 1000, data: new Uint8Array(50)})")
    served.rate = None
    assert opened(page, served)["sha256"] == served.sha256
    assert [asked is None for asked in served.asked] == [True, False, True]


def test_a_file_that_changed_at_the_server_starts_over(page: Page, served: Served) -> None:
    served.new(8 * MB, rate=8 * MB)
    opened(page, served, at=3 * MB, how="cancel")
    served.etag, served.rate = '"another"', None
    assert opened(page, served)["sha256"] == served.sha256
    assert len(served.asked) == 2  # the second was answered with all of it


def test_a_truncated_file_is_removed_and_fetched_again(page: Page, served: Served) -> None:
    served.new(2 * MB)
    opened(page, served)
    page.evaluate("last.worker.terminate()")
    page.wait_for_timeout(200)
    damage(page, served.sha256, "truncate(100)")
    assert opened(page, served)["stages"] == ["download"]


def test_a_second_tab_waits_and_takes_over_when_the_first_is_closed(context: BrowserContext, page: Page, served: Served) -> None:
    served.new(12 * MB, rate=4 * MB)
    first = context.new_page()
    first.goto(served.origin)
    first.evaluate(f"(job) => {{ void ({OPEN})(job) }}", job(served))
    first.wait_for_function("last.progress && last.progress.done > 2e6")
    page.bring_to_front()  # behind another it is drawn, and looks at what it waits for, once a second
    page.evaluate(f"(job) => {{ globalThis.result = ({OPEN})(job) }}", job(served))
    page.wait_for_function("last.progress && last.progress.stage === 'waiting' && last.progress.done > 2e6")
    assert len(served.asked) == 1
    served.rate = None
    first.close()
    assert page.evaluate("result")["sha256"] == served.sha256
    assert page.evaluate("last.progress.stage") == "download" and len(served.asked) == 2


def test_a_wrong_file_is_refused_and_not_kept(page: Page, served: Served) -> None:
    served.new(2 * MB)
    served.sha256 = "0" * 64
    wrong = opened(page, served)
    assert wrong["error"] == "IntegrityError" and served.sha256 in wrong["message"]
    assert not any(name.startswith("000000") for name in kept(page))
    assert len(served.asked) == 1


def test_other_models_make_room_and_what_never_fits_is_told_with_numbers(page: Page, context: BrowserContext, served: Served) -> None:
    page.evaluate(f"(async () => {{ const all = await {FOLDER}; for await (const name of all.keys()) await all.removeEntry(name) }})()")
    session = context.new_cdp_session(page)
    try:
        session.send("Storage.overrideQuotaForOrigin", {"origin": served.origin, "quotaSize": 5 * MB})
        served.new(3 * MB)
        opened(page, served)
        page.evaluate("last.worker.terminate()")
        page.wait_for_timeout(200)
        served.new(4 * MB)
        assert opened(page, served)["sha256"] == served.sha256
        assert kept(page) == {served.sha256[:6]}
        page.evaluate("last.worker.terminate()")
        served.new(9 * MB)
        full = opened(page, served)
        assert full["error"] == "StorageError" and "no room for" in full["message"] and "MB" in full["message"]
    finally:
        session.send("Storage.overrideQuotaForOrigin", {"origin": served.origin})
        session.detach()


@pytest.mark.parametrize(("lacking", "kind", "again"), [(["opfs"], "BlobSource", 0), (["opfs", "caches"], "MemorySource", 1)])
def test_browsers_that_lack_a_store_use_the_next(page: Page, served: Served, lacking: list[str], kind: str, again: int) -> None:
    served.new(3 * MB)
    for _ in range(2):
        found = opened(page, served, lacking=lacking)
        assert found["kind"] == kind and found["sha256"] == served.sha256
    assert len(served.asked) == 1 + again
    served.new(8 * MB, rate=8 * MB)
    assert opened(page, served, lacking=lacking, at=3 * MB, how="cancel")["error"] == "Cancelled"
    served.rate = None
    assert opened(page, served, lacking=lacking)["sha256"] == served.sha256
    served.sha256 = "1" * 64
    assert opened(page, served, lacking=lacking)["error"] == "IntegrityError"
