import pandas as pd
import pytest

from guardbit.records import Sample
from guardbit.store import RunFollower, RunWriter, read_run
from tests.store.made import put, write


def sample(step):
    return Sample(step, "h.0", 0, "max_logit", (float(step), 2.0))


def collect(follower):
    parts = [batch.to_pandas() for batch in follower.batches()]
    return pd.concat(parts).astype({"site": str, "indicator": str}) if parts else pd.DataFrame()


def same(rows, path):
    """Whether rows, some of them repeated, are what the reader reads."""
    columns = ["step", "layer", "site", "indicator", "head"]
    rows = rows.drop_duplicates(columns).sort_values(columns, ignore_index=True)
    pd.testing.assert_frame_equal(rows, read_run(path), check_dtype=False)
    return True


@pytest.mark.parametrize("inner", ["", "guardbit"])  # its own folder, or the log directory's
def test_a_folder_that_does_not_exist_yet(tmp_path, inner):
    follower = RunFollower(tmp_path / "later")
    assert follower.look() is False
    assert collect(follower).empty and follower.last_written is None
    write(tmp_path / "later" / inner, sample(1))
    assert follower.look() is False
    assert same(collect(follower), tmp_path / "later")
    assert follower.last_written is not None


@pytest.mark.parametrize("looks_every", [1, 8, 30])
def test_nothing_is_missed_whatever_is_merged_in_between(tmp_path, looks_every):
    follower, seen = RunFollower(tmp_path), []
    with RunWriter(tmp_path) as writer:
        for step in range(70):
            put(writer, sample(step))
            if step % looks_every == 0:
                follower.look()
                seen.append(collect(follower))
    follower.look()  # all in one file now
    seen.append(collect(follower))
    assert same(pd.concat(seen), tmp_path)
    assert seen[-1].empty == (69 % looks_every == 0), "what was read already is passed over"
    follower.look()
    assert collect(follower).empty


def test_a_resumed_run_starts_over_and_hides_what_it_does_again(tmp_path):
    write(tmp_path, *map(sample, range(10)))
    follower = RunFollower(tmp_path)
    follower.look()
    collect(follower)
    writer = RunWriter(tmp_path, start_step=5)
    assert follower.look() is False  # it has recorded nothing yet, and hides nothing
    put(writer, sample(6))
    assert follower.look() is True
    assert same(collect(follower), tmp_path)
    writer.close()


def test_a_broken_segment_is_said_once_and_the_rest_is_read(tmp_path):
    write(tmp_path, sample(1))
    write(tmp_path, sample(2), start_step=1)
    min(tmp_path.glob("samples-*")).write_bytes(b"PAR1")
    follower = RunFollower(tmp_path)
    follower.look()
    with pytest.warns(UserWarning, match="left out the segment"):
        assert collect(follower)["step"].tolist() == [2, 2]
    follower.look()
    assert collect(follower).empty


def test_what_is_merged_after_a_look_is_found_by_the_next(tmp_path):
    follower = RunFollower(tmp_path)
    writer = RunWriter(tmp_path)
    put(writer, sample(1))
    put(writer, sample(2))
    follower.look()
    writer.close()  # merges what the look has found
    assert collect(follower).empty
    follower.look()
    assert same(collect(follower), tmp_path)
