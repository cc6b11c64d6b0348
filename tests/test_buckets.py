"""A job's folder in a bucket: nothing that one process writes there is lost, and what cannot be there is said."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bucket import Bucket
from commandline import run, run_json
from meshmend.buckets import SharedFile, as_os_errors, as_path, create, is_bucket, own_folder, writable_path
from meshmend.cost import find_hardware
from meshmend.cost.hardware import read_hardware, write_hardware
from meshmend.doctor.probes import try_shared
from meshmend.errors import MeshmendError, MissingExtraError, ParameterError, QuarantineError, RestartError
from meshmend.launch import host as host_module
from meshmend.launch.host import HostDescription, check_admitted
from meshmend.launch.hosts import Hosts
from meshmend.planning import Workload
from meshmend.planning.step import StepDemands
from meshmend.quarantine import FaultLog, Observation, QuarantineList, Suspect, report, untrusted

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("gcsfs")
pytest.importorskip("gcp_storage_emulator")
pytest.importorskip("orbax.checkpoint")

from meshmend.jax.session.shared_folder import open_shared  # noqa: E402
from meshmend.jax.state.disk import disk as disk_module  # noqa: E402

HOSTS = Hosts.of("4x4", "2x2")


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    with Bucket() as bucket, pytest.MonkeyPatch.context() as patch:
        for name, value in bucket.environment.items():
            patch.setenv(name, value)
        fsspec.filesystem("gcs").clear_instance_cache()
        yield bucket
    fsspec.filesystem("gcs").clear_instance_cache()


@pytest.fixture
def job(server: Bucket, request: pytest.FixtureRequest) -> str:
    """A new job's folder."""
    return f"gs://bucket/{request.node.name.replace('[', '-').replace(']', '')}"


def in_threads(n: int, call: Any) -> None:
    threads = [threading.Thread(target=call, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_of_all_that_create_one_object_one_succeeds(job: str) -> None:
    made, refused = list[int](), list[int]()

    def try_it(number: int) -> None:
        try:
            create(as_path(job) / "name", f"job {number}")
            made.append(number)
        except FileExistsError:
            refused.append(number)

    in_threads(12, try_it)
    assert (len(made), len(refused)) == (1, 11)
    assert as_path(f"{job}/name").read_text() == f"job {made[0]}"


def test_who_has_missed_the_answer_to_its_own_creation_is_not_refused(job: str) -> None:
    create(as_path(job) / "name", "mine")
    create(as_path(job) / "name", "mine")
    with pytest.raises(FileExistsError):
        create(as_path(job) / "name", "yours")


def test_changes_at_the_same_time_lose_nothing(job: str, server: Bucket) -> None:
    def add(number: int) -> None:
        def make() -> str:
            try:
                before = file.read(1000)[0].decode()
            except FileNotFoundError:
                before = ""
            return f"{before}{number:02} "

        file = SharedFile(job, "file")
        file.change(make)

    in_threads(10, add)
    content, size = SharedFile(job, "file").read(1000)
    assert sorted(map(int, content.split())) == [*range(10)]
    assert size == 30
    assert SharedFile(job, "file").read(3) == (content[:3], 30)
    folder = f"{job.removeprefix('gs://bucket/')}/file/"
    assert sorted(server.names(folder)) == sorted(f"{folder}{number}" for number in range(1, 11))


def test_what_others_write_later_is_seen_by_who_has_listed_the_folder_before(job: str, server: Bucket) -> None:
    mine = QuarantineList(job)
    assert mine.read() == ()
    script = f"from meshmend.quarantine import *; QuarantineList({job!r}).add(Suspect.parse('2,3'), why='flips')"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    assert [str(entry.suspect) for entry in mine.active()] == ["2,3"]


def test_observations_of_many_processes_count_once_and_none_is_lost(job: str) -> None:
    def see(process: int) -> None:
        own = Observation("digest", (Suspect.parse("0,1"),), 7 + process % 3, "differs", {"agree": 15, "differ": 1})
        report(job, [own], attempt=1, verified=5, hosts=HOSTS)

    in_threads(9, see)
    assert sorted(noted.observation.step for noted in FaultLog(job).read()) == [7, 8, 9]
    assert untrusted(FaultLog(job)) == [(1, 5)]
    assert QuarantineList(job).read() == (), "one attempt's digests are one observation"
    again = Observation("digest", (Suspect.parse("0,1"),), 7, "differs", {"agree": 15, "differ": 1})
    made = report(job, [again], attempt=2, verified=6, hosts=HOSTS)
    assert [str(entry.suspect) for entry in made] == ["0,1"]
    QuarantineList(job).clear()
    assert QuarantineList(job).active() == ()
    assert report(job, [again], attempt=2, verified=6, hosts=HOSTS) == (), "what was cleared is settled"


def test_a_damaged_list_in_a_bucket_is_never_an_empty_one(job: str, server: Bucket) -> None:
    server.put(f"{job.removeprefix('gs://bucket/')}/quarantine.json/1", b"{")
    with pytest.raises(QuarantineError, match=rf"{job}/quarantine\.json is damaged: it is not JSON"):
        QuarantineList(job).active()


def test_the_command_line_changes_the_list_of_a_bucket(job: str) -> None:
    assert "hot" in run("quarantine", "add", job, "2,3", "--why", "hot")
    assert "hot" in run("quarantine", "list", job)
    assert "Cleared: 2,3." in run("quarantine", "clear", job, "2,3")
    assert f"Nothing is in quarantine in {job}." in run("quarantine", "list", job, width=200)


def description(job: str, host: int) -> HostDescription:
    return HostDescription(["x.py"], "", host, (2, 4), "job", str(HOSTS), {"MESHMEND_SHARED": job})


def test_an_agent_reads_the_list_of_a_bucket(job: str) -> None:
    QuarantineList(job).add(Suspect.parse("host 2"), why="hot")
    check_admitted(description(job, 1))
    with pytest.raises(Exception, match=rf"all chips of host 2 are in quarantine.*quarantine list {job}"):
        check_admitted(description(job, 2))


def test_an_agent_goes_on_without_a_bucket_that_does_not_answer(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(self: Any) -> tuple[()]:
        asked.append(self)
        release.wait(60)
        raise OSError("the bucket is away")

    asked: list[Any] = []
    monkeypatch.setattr(QuarantineList, "active", hang)
    monkeypatch.setattr(host_module, "LIST_S", 0.2)
    began = time.monotonic()
    check_admitted(description(job, 1))
    assert time.monotonic() - began < 30
    release.set()
    check_admitted(description(job, 1))
    assert len(asked) == 2


def test_an_error_of_the_buckets_library_is_one_of_a_disk() -> None:
    class HttpError(Exception):
        """As gcsfs has it."""

    with pytest.raises(OSError, match="gs://b/c cannot be reached: HttpError: 503"), as_os_errors("gs://b/c"):
        raise HttpError("503")
    for kind, where in ((HttpError, "/shared"), (FileExistsError, "gs://b/c"), (QuarantineError, "gs://b/c")):
        with pytest.raises(kind), as_os_errors(where):
            raise kind("as it was")


def test_what_a_step_is_planned_for_and_the_hardware_are_in_the_bucket(job: str) -> None:
    hardware = find_hardware("tpu-v6e")
    demands = StepDemands(Workload(1e6), hardware)
    with pytest.raises(ParameterError, match=rf"{job}/planned-for\.json does not say"):
        StepDemands.read(as_path(job))
    demands.write(as_path(job))
    assert StepDemands.read(as_path(job)) == demands
    path = as_path(job) / "hardware" / "v6e.json"
    with pytest.raises(ParameterError, match="cannot be read"):
        read_hardware(path)
    write_hardware(hardware, path, {})
    assert read_hardware(path) == hardware


def test_prepare_reads_the_bucket_and_fills_this_hosts_cache(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    StepDemands(Workload(8192), find_hardware("tpu-v6e")).write(as_path(job))
    facts = run_json("prepare", "4x4", "--host", "2x2", "--shared", f"{job}/")
    assert facts["cache"] == str(own_folder(job) / "plans")
    assert facts["plans"] == 5
    assert list((own_folder(job) / "plans").glob("*.npz"))


def test_two_parts_of_a_job_never_claim_the_same_attempt(job: str) -> None:
    one, other = disk_module.Disk(job), disk_module.Disk(job)
    claimed, refused = list[int](), list[str]()

    def claim(number: int) -> None:
        try:
            disk_module.Disk(job).hold_claim(1)
            claimed.append(number)
        except disk_module.SupersededError as error:
            refused.append(str(error))

    assert one.claimed() == 0
    in_threads(4, claim)
    assert (len(claimed), len(refused)) == (1, 3)
    assert set(refused) == {"Another part of this job continues as attempt 1: this one must stop."}
    one.hold_claim(2)
    one.hold_claim(2)
    other.hold_claim(3)
    with pytest.raises(disk_module.SupersededError, match="continues as attempt 3, while this one was attempt 2"):
        one.hold_claim(2)


def test_checkpoints_of_a_bucket_are_set_aside_and_those_of_before_go(job: str, server: Bucket) -> None:
    disk, prefix = disk_module.Disk(job), job.removeprefix("gs://bucket/")
    for step in (3, 5):
        for name in ("state/values", disk_module.COMMITTED):
            server.put(f"{prefix}/{step}/{name}", b"x")
    server.put(f"{prefix}/7/state/values", b"x")
    assert disk.steps() == [3, 5], "what has no mark is not complete"
    assert disk.set_aside_all_but({3}) == [5]
    assert disk.steps() == [3]
    kept = {f"{prefix}/{disk_module.ABANDONED}/5/{name}" for name in ("state/values", disk_module.COMMITTED)}
    assert kept <= {*server.names(prefix)}
    server.put(f"{prefix}/7/{disk_module.COMMITTED}", b"x")
    assert disk.set_aside_all_but({3}) == [7]
    assert not kept & {*server.names(prefix)}
    assert f"{prefix}/{disk_module.ABANDONED}/7/state/values" in server.names(prefix)


def test_a_job_has_one_name_in_a_bucket_and_another_in_another_folder(job: str, server: Bucket) -> None:
    names = list[str]()
    in_threads(8, lambda _: names.append(open_shared(job).name))
    assert len({*names}) == 1
    assert open_shared(f"{job}-2").name != names[0]
    opened = open_shared(job)
    assert str(opened.disk) == f"{job}/disk"
    assert opened.plans == own_folder(job) / "plans"
    server.put(f"{job.removeprefix('gs://bucket/')}/name", b"job-1")
    with pytest.raises(RestartError, match=rf"{job}/name is damaged: expected the job's name.* got 'job-1'"):
        open_shared(job)


def test_a_bucket_that_is_not_there_is_said(server: Bucket) -> None:
    with pytest.raises(RestartError, match=r"gs://no-such-bucket/job cannot be written to"):
        open_shared("gs://no-such-bucket/job")


def test_the_doctor_tries_the_folder(job: str, server: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (job, str(tmp_path)):
        monkeypatch.setenv("MESHMEND_SHARED", folder)
        assert try_shared() == {"detail": f"{folder}: a file was created, read and removed"}
    assert server.names(job.removeprefix("gs://bucket/")) == []
    assert list(tmp_path.iterdir()) == []
    # A bucket that would create an object twice loses changes, so it is no place for a job.
    monkeypatch.setattr("meshmend.doctor.probes.create", lambda path, content: path.write_text(content))
    with pytest.raises(MeshmendError, match="the result is wrong"):
        try_shared()


def test_each_host_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here, other = own_folder("gs://bucket/a"), own_folder("gs://bucket/b")
    assert here.parent == tmp_path / "cache" / "meshmend"
    assert here != other
    assert here.stat().st_mode & 0o077 == 0
    assert own_folder(as_path("gs://bucket/a/")) == here
    assert own_folder(Path("/shared")) == Path("/shared")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert own_folder("gs://bucket/a") == tmp_path / "temporary" / f"meshmend-{os.getuid()}" / here.name


def test_a_url_survives_pathlib() -> None:
    assert str(as_path(Path("gs://bucket/job"))) == str(as_path("gs://bucket/job/")) == "gs://bucket/job"
    assert [is_bucket(one) for one in ("gs://b/j", Path("gs://b/j"), "s3://b", "a/b", "/a:/b", Path("job"))] == [
        *(True, True, True),
        *(False, False, False),
    ]


def test_without_gcsfs_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshmend.extras.find_spec", lambda name: None if name == "gcsfs" else object())
    with pytest.raises(MissingExtraError, match=r"gs://bucket/job needs gcsfs.*pip install 'meshmend\[gcs\]'"):
        writable_path("gs://bucket/job")


def test_s3_is_refused_with_what_orbax_lacks(tmp_path: Path) -> None:
    utils = pytest.importorskip("orbax.checkpoint._src.serialization.tensorstore_utils")
    with pytest.raises(ValueError, match="Checkpoint path should be absolute") as refused:
        utils.build_kvstore_tspec("s3://bucket/job", name="w", use_ocdbt=True)
    for folder in ("s3://bucket/job", Path("s3://bucket/job"), "az://bucket/job"):
        with pytest.raises(ParameterError, match=r"Orbax takes any other URL for a relative path") as ours:
            writable_path(folder)
    assert str(refused.value).partition(". Got")[0] in str(ours.value)
    (tmp_path / "train.py").write_text("")
    words = ("--hosts", "1:2", "--shape", "1x2", "--host", "1x1", "--store", "127.0.0.1", "--shared", "s3://bucket/job")
    assert "s3://bucket/job cannot hold a job" in run("run", *words, tmp_path / "train.py", code=1, width=200)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["run", "--local", "1x2", "--shared", "gs://b/j", "SCRIPT"], "with --local, give --shared DIR"),
        (
            ["run", "--metrics", "127.0.0.1:1", "--shared", "gs://b/j", "--host-index", "0", "SCRIPT"],
            "so give it to `meshmend store`",
        ),
        (["store", "--folder", "gs://b/j"], "so give --folder DIR"),
        (["watch", "gs://b/j", "--once"], "that of the job's store"),
    ],
)
def test_what_needs_a_folder_says_which(words: list[str], why: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    shown = run(*(word.replace("SCRIPT", str(tmp_path / "train.py")) for word in words), code=1, width=300)
    assert "is not a folder of this machine" in shown
    assert why in shown
