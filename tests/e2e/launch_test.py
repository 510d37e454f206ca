"""`ferry launch` as a user runs it: with a stand-in for mpirun where what it is told and what it says
matter, with the real one to train; other hosts are this one behind a stand-in for ssh."""

import json
import os
import shutil
import signal
import socket
import sys
import time
import unittest

from harness import FERRY, QUICK, USAGE, FerryTest, start

LOST = 6

SSH = """#!/bin/sh
while true; do
    case "$1" in
        -o) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
host=$1
shift
echo "$host: $*" >> "$FERRY_TEST_SSH"
case "$host" in
    nowhere) echo "ssh: Could not resolve hostname nowhere: Name or service not known" >&2; exit 255 ;;
    empty) exec sh -c "cd / && sha256sum -- /nonexistent/ferry" ;;
    old-ferry) sh -c "$*" | sed '1s/^[0-9a-f]\\{8\\}/00000000/' ;;
    old-config) sh -c "$*" | sed '2s/^[0-9a-f]\\{8\\}/00000000/' ;;
    *)  # A machine of its own: two of mpirun's daemons in one TMPDIR take each other's files.
        TMPDIR=$FERRY_TEST_SSH.$host
        export TMPDIR
        mkdir -p "$TMPDIR"
        exec sh -c "$*" ;;
esac
"""


class LaunchTest(FerryTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.bin = cls.path("bin")
        os.mkdir(cls.bin)
        cls.program("ssh", SSH)
        cls.ssh_log = cls.path("ssh.log")
        cls.config_file = cls.command(cls.config(steps=2, batch__micro_batches=2))[1]

    def setUp(self):
        for name in ("mpirun", "mpirun.args"):
            if os.path.exists(os.path.join(self.bin, name)):
                os.unlink(os.path.join(self.bin, name))
        with open(self.ssh_log, "w", encoding="ascii"):
            pass

    @classmethod
    def program(cls, name, text):
        path = os.path.join(cls.bin, name)
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
        os.chmod(path, 0o755)

    def mpirun_that(self, *lines, code=0):
        """Says these lines and keeps what it was told."""
        said = "".join(f"    {line!r},\n" for line in lines)
        self.program("mpirun", f"""#!{sys.executable}
import sys, time
with open({os.path.join(self.bin, "mpirun.args")!r}, "w") as file:
    file.write("\\n".join(sys.argv[1:]))
for text in [
{said}]:
    stream = sys.stderr if "<stderr>" in text else sys.stdout
    stream.write(text)
    stream.flush()
    time.sleep(0.02)
sys.exit({code})
""")

    def told(self):
        with open(os.path.join(self.bin, "mpirun.args"), encoding="ascii") as file:
            return file.read().split("\n")

    def asked(self):
        with open(self.ssh_log, encoding="ascii") as file:
            return file.read()

    def hostfile(self, text):
        path = self.path("hosts")
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
        return path

    def environment(self, **more):
        return {**os.environ, "PATH": self.bin + ":" + os.environ["PATH"],
                "FERRY_TEST_SSH": self.ssh_log, **more}

    def running(self, config, until, *arguments):
        """The process, once it has printed that."""
        process = start([FERRY, "launch", "--hostfile", self.hostfile("localhost slots=2\n"), config, *arguments],
                        env=self.environment())
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        for line in process.stdout:
            if until in line:
                break
        return process

    def launch(self, hosts, *arguments, config=None, **more):
        return self.ferry("launch", "--hostfile", self.hostfile(hosts), config or self.config_file,
                          *arguments, env=self.environment(**more))

    def refused(self, hosts, said, *arguments, **options):
        run = self.launch(hosts, *arguments, **options)
        self.assertEqual(run.code, USAGE, run.err)
        for text in said:
            self.assertIn(text, run.err)
        self.assertEqual(run.out, "")


class HostfileTest(LaunchTest):
    def line(self, hosts, *arguments):
        run = self.launch(hosts, "--dry-run", *arguments)
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(self.asked(), "")
        return run.out

    def test_a_part_of_the_line_for_each_host(self):
        line = self.line("# two hosts\n\nworker-0 slots=2  # the first\n\tworker-1   slots=4\r\n",
                         "--", "--set", "steps=3")
        train = f"{os.path.realpath(FERRY)} train {self.config_file} --set steps=3"
        parts = line.strip().split(" : ")
        self.assertEqual(len(parts), 2)
        self.assertTrue(parts[0].startswith("mpirun --tag-output --bind-to none"), line)
        self.assertIn("-n 2 --host worker-0:2 ", parts[0])
        self.assertTrue(parts[0].endswith(train), line)
        self.assertTrue(parts[1].startswith("-n 4 --host worker-1:4 "), line)
        self.assertTrue(parts[1].endswith(train), line)
        self.assertNotIn("CUDA_VISIBLE_DEVICES", line)
        self.assertEqual("--allow-run-as-root" in line, os.geteuid() == 0)

    def test_include_and_exclude(self):
        hosts = "worker-0 slots=2\nworker-1 slots=4\nworker-2 slots=1\n"
        line = self.line(hosts, "--include", "worker-2@worker-1:0,2")
        self.assertNotIn("worker-0", line)
        self.assertIn("-n 2 --host worker-1:2 -x CUDA_VISIBLE_DEVICES=0,2 ", line)
        self.assertIn("-n 1 --host worker-2:1 ", line)
        self.assertLess(line.index("worker-1"), line.index("worker-2"))  # as in the file
        line = self.line(hosts, "--exclude", "worker-2@worker-1:0,2")
        self.assertIn("-n 2 --host worker-0:2 ", line)
        self.assertIn("-n 2 --host worker-1:2 -x CUDA_VISIBLE_DEVICES=1,3 ", line)
        self.assertNotIn("worker-2", line)

    def test_what_libraries_read_is_passed_on(self):
        run = self.launch("a slots=1\n", "--dry-run", NCCL_NVLS_ENABLE="0", FERRY_LOG="warn")
        self.assertIn("-x FERRY_LOG ", run.out)
        self.assertIn("-x NCCL_NVLS_ENABLE ", run.out)
        run = self.launch("a slots=1\n", "--dry-run", FERRY_LOG_LABEL="mine")
        self.assertEqual(run.out.count("FERRY_LOG_LABEL"), 1, run.out)

    def test_words_are_quoted_for_the_shell(self):
        line = self.line("a slots=1\n", "--", "--set", "data.tokens=it's here")
        self.assertIn(r"'data.tokens=it'\''s here'", line)

    def test_a_long_hostfile(self):
        """Forty thousand hosts: who compares each with each is not done when the harness gives up."""
        hosts = "".join(f"host-{i} slots=1\n" for i in range(40000))
        self.refused(hosts + "host-39999 slots=2\n", ["stands twice", "line 40001"])

    def test_hostfiles_that_are_not_understood(self):
        for text, line, fault in (("a slots=1\nb\n", 2, "no slots"),
                                  ("a slots=1\nb slot=2\n", 2, '"slot=2"'),
                                  ("a slots=0\n", 1, '"slots=0"'),
                                  ("a slots=two\n", 1, '"slots=two"'),
                                  ("a slots=2x\n", 1, '"slots=2x"'),
                                  ("a slots=-1\n", 1, '"slots=-1"'),
                                  ("a slots=99999\n", 1, '"slots=99999"'),
                                  ("\n\na slots=1 max_slots=2\n", 3, '"max_slots=2"'),
                                  ("-v slots=2\n", 1, "a host begins with -"),
                                  ("slots=2\n", 1, "no host")):
            self.refused(text, ["the hostfile is not understood", fault,
                                f"{self.path('hosts')}, line {line}", "host slots=N"])
        self.refused("a slots=1\n\na slots=2\n", ["stands twice", "line 3"])
        own = socket.gethostname()
        self.refused(f"localhost slots=1\n{own} slots=2\n",
                     ["stands twice", "line 2", f"{own}, which is localhost", "one line"])
        self.refused("# nobody\n", ["names no host"])
        run = self.ferry("launch", "--hostfile", self.path("absent"), self.config_file)
        self.assertEqual(run.code, USAGE)
        self.assertIn("No such file", run.err)
        run = self.ferry("launch", "--hostfile", self.bin, self.config_file)
        self.assertEqual(run.code, USAGE)
        for text in ("cannot read the hostfile", "Is a directory", "name a file"):
            self.assertIn(text, run.err)

    def test_choices_that_are_not_there(self):
        hosts = "worker-0 slots=2\nworker-1 slots=4\n"
        self.refused(hosts, ["no such host", '"worker-7"', 'did you mean "worker-'], "--include",
                     "worker-7")
        self.refused(hosts, ["no such slot of host worker-1", '"4"', "0 to 3"], "--include",
                     "worker-1:0,4")
        self.refused(hosts, ["no such slot", '"x"'], "--exclude", "worker-1:x")
        self.refused(hosts, ["no such slot", '""'], "--exclude", "worker-1:")
        for twice in ("worker-1@worker-1:1", "worker-1:0@worker-1:1"):
            self.refused(hosts, ["named twice", '"worker-1"', "worker-0@worker-1:0,2"], "--include", twice)
        self.refused(hosts, ["no slot is left"], "--exclude", "worker-0@worker-1")
        self.refused(hosts, ["exclude each other"], "--include", "worker-0", "--exclude", "worker-1")


class ChecksTest(LaunchTest):
    def setUp(self):
        super().setUp()
        self.mpirun_that()

    def test_this_machine_needs_no_ssh(self):
        run = self.launch("localhost slots=2\n")
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(self.asked(), "")
        self.assertIn("localhost:2", self.told())

    def test_every_other_host_is_asked_for_program_and_configuration(self):
        run = self.launch("worker-0 slots=1\nworker-1 slots=1\n")
        self.assertEqual(run.code, 0, run.err)
        for host in ("worker-0", "worker-1"):
            self.assertRegex(self.asked(), f"{host}: cd .* sha256sum .*ferry .*json")
        self.assertIn("2 ranks on 2 hosts", run.out)

    def started(self):
        return os.path.exists(os.path.join(self.bin, "mpirun.args"))

    def test_hosts_that_differ_or_are_not_there(self):
        for host, said in (("nowhere", ["cannot be reached", "Could not resolve hostname"]),
                           ("empty", ["has not got the program", "No such file"]),
                           ("old-ferry", ["another program", "SHA-256 00000000"]),
                           ("old-config", ["another configuration", self.config_file,
                                           "SHA-256 00000000"])):
            self.refused(f"worker-0 slots=1\n{host} slots=2\n", [f"host {host}", *said])
            self.assertFalse(self.started())

    def test_no_configuration(self):
        for config, said in ((self.path("absent.json"), "No such file"), (self.bin, "Is a directory")):
            self.refused("localhost slots=1\n", ["configuration cannot be read", config, said, "name a file"],
                         config=config)

    def test_programs_that_are_not_there(self):
        for missing, package in (("mpirun", "openmpi-bin"), ("sha256sum", "coreutils"),
                                 ("ssh", "openssh-client")):
            tools = self.path(f"without-{missing}")
            os.mkdir(tools)
            for name in {"mpirun", "sha256sum", "ssh", "sh"} - {missing}:
                own = os.path.join(self.bin, name)
                os.symlink(own if os.path.exists(own) else shutil.which(name), os.path.join(tools, name))
            self.refused("worker-0 slots=1\n", [f"there is no {missing} to", package], PATH=tools)
            self.assertFalse(self.started())


class OutputTest(LaunchTest):
    def test_every_line_has_its_rank(self):
        self.mpirun_that("[77,0]<stdout>:one\n", "[77,1]<stderr>:a warning\n",
                         # A line that mpirun passes on in parts, between them one of another rank.
                         "[77,0]<stdout>:half[77,1]<stdout>:of [1,2] rank 1\n",
                         "[77,0]<stdout>: and half\n", "mpirun speaks\n", "[77,2]<stdout>:no end")
        run = self.launch("localhost slots=3\n")
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(run.out.splitlines()[1:],
                         ["[rank 0] one", "[rank 1] of [1,2] rank 1", "[rank 0] half and half",
                          "[rank 2] no end"])
        self.assertEqual(run.err.splitlines(), ["[rank 1] a warning", "[mpirun] mpirun speaks"])

    def test_the_first_failing_ranks_error_comes_last(self):
        self.mpirun_that(
            "[7,0]<stdout>:step 1\n",
            "[7,0]<stderr>:ferry: lost rank 2: it ended with an error: storage failed\n",
            "[7,0]<stderr>:  where:    all-gather of the weights of layer 3, step 12\n",
            "[7,2]<stderr>:ferry: storage failed\n[7,2]<stderr>:  where:    /nvme/ferry.slots0\n",
            "[7,1]<stderr>:ferry: rank 0 has given this rank (1) up: took no part\n",
            "[7,2]<stderr>:  limit:    4096 B\n", "[7,2]<stderr>:something else\n", code=4)
        run = self.launch("localhost slots=3\n")
        self.assertEqual(run.code, 4)
        self.assertTrue(run.err.endswith("ferry: rank 2 failed: storage failed\n"
                                         "  where:    /nvme/ferry.slots0\n  limit:    4096 B\n"), run.err)

    def test_the_lost_rank_is_named_where_no_other_failed(self):
        for lost, said in (("rank 0: its process has ended", "rank 0 was lost: its process has ended"),
                           ("ranks 0 and 3: took no part", "ranks 0 and 3 were lost: took no part"),
                           ("a rank: NCCL's: failed", "a rank was lost: NCCL's: failed")):
            with self.subTest(lost=lost):
                self.mpirun_that(f"[7,1]<stderr>:ferry: lost {lost}\n[7,1]<stderr>:  where:    step 3\n",
                                 f"[7,2]<stderr>:ferry: lost {lost}\n",
                                 "mpirun noticed that process rank 0 exited on signal 9 (Killed).\n",
                                 code=137)
                run = self.launch("localhost slots=4\n")
                self.assertEqual(run.code, LOST)
                self.assertTrue(run.err.endswith(f"\nferry: {said}\n  where:    step 3\n"), run.err)

    def test_a_rank_that_others_have_given_up_failed(self):
        self.mpirun_that("[7,1]<stderr>:ferry: rank 0 has given this rank (1) up: took no part\n", code=6)
        run = self.launch("localhost slots=2\n")
        self.assertTrue(run.err.endswith("ferry: rank 1 failed: rank 0 has given this rank (1) up: "
                                         "took no part\n"), run.err)

    def test_where_nobody_says_why(self):
        self.mpirun_that("[7,0]<stdout>:step 1\n", code=137)
        run = self.launch("localhost slots=1\n")
        self.assertEqual(run.code, LOST)
        self.assertIn("ended without saying why", run.err)
        self.assertIn("exit code 137", run.err)

    def test_what_ranks_print_steers_no_terminal(self):
        self.mpirun_that("[7,0]<stdout>:one\x1b[2J\n\x1b]0;title\x07\n", code=0)
        run = self.launch("localhost slots=1\n")
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("[rank 0] one\\x1b[2J\n", run.out)
        self.assertNotIn("\x1b", run.out + run.err)
        self.assertNotIn("\x07", run.out + run.err)

    def test_an_interrupt_reaches_mpirun(self):
        self.program("mpirun", "#!/bin/sh\ntrap 'echo \"[7,0]<stdout>:asked to end\"; exit 0' USR1\n"
                               "echo '[7,0]<stdout>:ready'\nwhile true; do sleep 0.05; done\n")
        process = self.running(self.config_file, "ready")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual(out, "[rank 0] asked to end\n", err)
        self.assertEqual(process.returncode, 0)

    def test_a_second_interrupt_ends_mpirun(self):
        self.program("mpirun", "#!/bin/sh\ntrap 'echo \"[7,0]<stdout>:asked to end\"' USR1\n"
                               "trap 'echo \"[7,0]<stdout>:told to\"; exit 1' TERM\n"
                               "echo '[7,0]<stdout>:ready'\nwhile true; do sleep 0.05; done\n")
        process = self.running(self.config_file, "ready")
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.stdout.readline(), "[rank 0] asked to end\n")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual(out, "[rank 0] told to\n", err)
        self.assertEqual(process.returncode, -signal.SIGINT)

    def test_a_launch_that_is_killed_ends_mpirun(self):
        told = self.path("told-to-end")
        self.program("mpirun", f"#!/bin/sh\ntrap 'touch {told}; exit 1' TERM\n"
                               "echo '[7,0]<stdout>:ready'\n"
                               "for i in $(seq 600); do sleep 0.05; done\n")
        self.running(self.config_file, "ready").kill()
        deadline = time.monotonic() + 20
        while not os.path.exists(told) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertTrue(os.path.exists(told))


@unittest.skipUnless(shutil.which("mpirun"), "no mpirun")
class TrainingTest(LaunchTest):
    def final_hashes(self, run):
        return [line["text"].split("state_hash")[1] for line in run.lines
                if "state_hash" in line.get("text", "")]

    def test_two_ranks_train_here(self):
        run = self.launch("localhost slots=2\n", "--", "--json", "--no-bound")
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("2 ranks on 1 hosts", run.out)
        self.assertTrue(self.final_hashes(run), run.out)
        self.assertIn("[rank 0] {", run.out)
        for rank in (0, 1):  # once a line
            self.assertRegex(run.err, rf"\[rank {rank}\] [^ ]* info planned by")

    def test_an_interrupt_ends_all_after_their_step(self):
        """Steps of an instant, whose output is on its way, and of longer than mpirun leaves to ranks it ends."""
        for name, changes in (("short", {"steps": 100000}), ("long", {"steps": 3, "batch__micro_batches": 2000 if QUICK else 3000})):
            with self.subTest(steps=name):
                config = self.command(self.config(**{"batch__micro_batches": 2, **changes}))[1]
                process = self.running(config, '"loss"', "--", "--json", "--no-bound")
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=120)
                self.assertEqual(process.returncode, 0, err)
                lines = [json.loads(line.removeprefix("[rank 0] ")) for line in out.splitlines()]
                self.assertTrue(next(line["summary"] for line in lines if "summary" in line)["interrupted"])
                self.assertIn("state_hash", lines[-1])
                self.assertLess(sum("loss" in line for line in lines) + 1, changes["steps"])

    def test_hosts_behind_ssh(self):
        run = self.launch("worker-0 slots=1\nworker-1 slots=1\n", "--", "--json", "--no-bound")
        self.assertEqual(run.code, 0, run.err)
        self.assertTrue(self.final_hashes(run), run.out)
        self.assertIn("worker-1: ", self.asked())

    def test_a_killed_rank_is_the_one_that_was_lost(self):
        config = self.command(self.config(steps=100000, batch__micro_batches=2))[1]
        process = start([FERRY, "launch", "--hostfile", self.hostfile("localhost slots=2\n"), config, "--",
                         "--json", "--no-bound"], env=self.environment())
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        for line in process.stdout:
            if '"loss"' in line:
                break
        os.kill(self.ranks_of(config)[1], signal.SIGKILL)
        _, err = process.communicate(timeout=120)
        self.assertRegex(err, r"\nferry: rank 1 was lost: its process has ended\n(  .*\n)*$")
        self.assertNotIn("failed:", err)
        self.assertEqual(process.returncode, LOST)

    def test_what_all_ranks_are_refused_by_stands_once_among_their_lines(self):
        run = self.launch("localhost slots=4\n", "--", "--set", "parallel.pipeline=3")
        self.assertEqual(run.code, USAGE, run.err)
        said = [line for line in run.err.splitlines() if "the ranks cannot be cut into groups" in line]
        self.assertEqual([line.partition("ferry: ")[0] for line in said], ["[rank 0] ", ""], run.err)  # and at the end

    def test_a_failing_run_says_so_last(self):
        start = time.monotonic()
        run = self.launch("localhost slots=2\n", "--", "--set", "steps=nothing")
        self.assertEqual(run.code, USAGE, run.err)
        lines = run.err.splitlines()
        begin = max(i for i, line in enumerate(lines) if line.startswith("ferry: "))
        self.assertRegex(lines[begin], "ferry: rank [01] failed: ")
        self.assertTrue(all(line.startswith("  ") for line in lines[begin + 1:]), run.err)
        self.assertLess(time.monotonic() - start, 100)


if __name__ == "__main__":
    unittest.main()
