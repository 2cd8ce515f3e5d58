"""Forked children compute the right result or raise a typed error.

They never wait for threads that the fork did not copy.
"""

from __future__ import annotations

import textwrap

import pytest

from tests.harness import processes

TIMEOUT_S = 240
"""For the whole script: compiling is in it; its children wait at most ten seconds each."""

PRELUDE = """
    import os, signal, threading, time, torch, zlib
    import flashattn_jit as fa

    torch.set_num_threads(2)
    torch.manual_seed(0)
    q = torch.randn(2, 4, 300, 32)
    rows = torch.randn(600, 4, 32)
    indptr = torch.tensor([0, 300, 600])
    batch = fa.BatchAttention(num_q_heads=4, num_kv_heads=4, head_dim=32, q_dtype=torch.float32)
    batch.plan(indptr, fa.Ragged(indptr))
    states = [torch.randn(2, 4, 2000, 32) for _ in range(2)]
    lses = [torch.randn(2, 4, 2000) for _ in range(2)]

    def dense():
        return fa.attention(q, q, q)

    def varlen():
        return fa.varlen_attention(rows, rows, rows, indptr, indptr)

    def run():
        return batch.run(rows, rows, rows)

    def merge():
        return fa.merge_states(states, lses)[0]

    def digest(out):  # a sum of torch's would depend on its number of threads
        return str(zlib.crc32(out.numpy().tobytes()))

    def in_child(work):
        # The outcome of a call in a forked child: its digest, its error's name and text, or "hang".
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                out = work()
                said = digest(out)
            except fa.LaunchError as error:
                said = f"LaunchError {error}"
            except BaseException as error:
                said = f"untyped {type(error).__name__} {error}"
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if os.waitpid(pid, os.WNOHANG)[0]:
                with os.fdopen(read, "rb") as pipe:
                    return pipe.read().decode()
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "hang"
"""


def run(body: str) -> list[str]:
    """The lines that a process of its own prints."""
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(body)
    done = processes.run(["-c", code], timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


CALLS = ("dense", "varlen", "run", "merge")


@pytest.mark.parametrize("call", CALLS)
def test_a_child_forked_after_a_threaded_call_gets_an_error(call):
    said, alone, again = run(f"""
        wanted = digest({call}())
        print(in_child({call}))

        def alone():
            torch.set_num_threads(1)
            return {call}()

        said = in_child(alone)
        print(said == wanted or (said, wanted))
        print(digest({call}()) == wanted)  # the parent goes on as before
    """)
    assert said.startswith("LaunchError this process was forked after"), said
    assert "torch.set_num_threads(1)" in said
    assert "spawn" in said
    assert alone == "True", alone
    assert again == "True"


def test_a_child_of_a_parent_that_used_one_thread_may_use_several():
    (said,) = run("""
        torch.set_num_threads(1)
        wanted = digest(dense())

        def threaded():
            torch.set_num_threads(2)
            return dense()

        print(in_child(threaded) == wanted)
    """)
    assert said == "True"


def test_another_thread_of_the_child_may_use_several():
    """OpenMP's threads belong to the thread that opens a region; a new one gets its own."""
    (said,) = run("""
        wanted = digest(dense())

        def in_a_thread():
            out = []
            thread = threading.Thread(target=lambda: out.append(dense()))
            thread.start()
            thread.join()
            return out[0]

        print(in_child(in_a_thread) == wanted)
    """)
    assert said == "True"


def test_a_child_of_a_child_gets_the_error_too():
    (said,) = run("""
        dense()

        def in_a_grandchild():
            said = in_child(dense)
            raise fa.LaunchError(said)

        print(in_child(in_a_grandchild))
    """)
    assert said.startswith("LaunchError LaunchError this process was forked"), said


def test_a_short_batch_of_one_thread_runs_in_the_child():
    """Work too short for a parallel region needs none, with its merge, whatever came before."""
    (said,) = run("""
        dense()
        short = fa.BatchAttention(num_q_heads=1, num_kv_heads=1, head_dim=8, q_dtype=torch.float32)
        row = torch.randn(1, 1, 8)
        short.plan(torch.tensor([0, 1]), fa.Ragged(torch.tensor([0, 1])))
        wanted = digest(short.run(row, row, row))
        print(in_child(lambda: short.run(row, row, row)) == wanted)
    """)
    assert said == "True"
