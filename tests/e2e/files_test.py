"""Files that change under a run, outputs that are no files, streams that are closed: nothing is lost without a word."""

import contextlib
import glob
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import unittest

from harness import FERRY, IO, USAGE, FerryTest, Run, start

BAD_SECTOR = os.path.join(os.environ.get("FERRY_BUILD_DIR", ""), "libbad_sector.so")


class TokensUnderARunTest(FerryTest):
    STEPS = 3000

    def setUp(self):
        self.file = self.path(f"{self.id().rpartition('.')[2]}.bin")
        shutil.copy(self.path("tokens.bin"), self.file)

    def while_it_trains(self, change):
        """A run whose token file is changed after some of its steps."""
        command = self.command(self.config(data__tokens=self.file, steps=self.STEPS))
        process = start([FERRY, *command])
        out = ""
        while out.count('"loss"') < 3:
            out += process.stdout.readline()
        change()
        # Enough is seen when it has gone on for a while: each step reads much of the file.
        while process.poll() is None and out.count('"loss"') < 300:
            out += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=120)
        return Run(process.returncode, out + rest, err)

    def assert_noticed(self, run, *words):
        self.assertEqual(run.code, IO, run.err)
        for text in ("the token file changed", self.file, *words):
            self.assertIn(text, run.err)

    def other_tokens(self):
        with open(self.file, "rb") as file:
            contents = bytearray(file.read())
        contents[64:] = bytes(byte ^ 1 for byte in contents[64:])
        return contents

    def test_another_file_copied_over_it(self):
        def change():
            contents = self.other_tokens()
            with open(self.file, "wb") as file:
                file.write(contents)
        self.assert_noticed(self.while_it_trains(change))

    def test_bytes_changed_with_the_time_put_back(self):
        def change():
            before = os.stat(self.file)
            with open(self.file, "r+b") as file:
                file.write(self.other_tokens())
            os.utime(self.file, ns=(before.st_atime_ns, before.st_mtime_ns))
        self.assert_noticed(self.while_it_trains(change), "other bytes than at the start")

    def test_a_shorter_file(self):
        self.assert_noticed(self.while_it_trains(lambda: os.truncate(self.file, 100)), "100 bytes long")

    def test_another_file_renamed_over_it_changes_nothing(self):
        undisturbed = self.while_it_trains(lambda: None)
        def change():
            other = self.file + "-other"
            with open(other, "wb") as file:
                file.write(self.other_tokens())
            os.rename(other, self.file)
        run = self.while_it_trains(change)
        self.assertEqual(run.code, 0, run.err)
        both = min(len(run.steps), len(undisturbed.steps))
        self.assertGreater(both, 100)
        self.assertEqual([step["loss"] for step in run.steps[:both]],
                         [step["loss"] for step in undisturbed.steps[:both]])

    def test_a_sector_that_cannot_be_read(self):
        if not os.path.exists(BAD_SECTOR):
            self.skipTest("not built")
        for good_reads in (0, 1, 40):
            env = {**os.environ, "LD_PRELOAD": BAD_SECTOR, "FERRY_TEST_BAD_FILE": self.file,
                   "FERRY_TEST_GOOD_READS": str(good_reads)}
            run = self.train(self.config(data__tokens=self.file, steps=self.STEPS), env=env)
            self.assertEqual(run.code, IO, run.err)
            for text in ("the token file cannot be read", self.file, "Input/output error"):
                self.assertIn(text, run.err)


class OutputsTest(FerryTest):
    def outputs(self, path):
        """Every option that names a file to write."""
        train = self.command(self.config(steps=1))
        return {
            "-o": ["data", self.path("text.txt"), "-o", path],
            "--trace": [*train, "--trace", path],
            "--weights-out": [*train, "--weights-out", path],
            "--export": [*train, "--export", path],
            "--save": ["bench", "io", self.path("nvme"), "--size", "16MiB", "--save", path],
            "--plot": ["bench", "io", self.path("nvme"), "--size", "16MiB", "--plot", path],
        }

    def test_a_path_that_cannot_be_followed_is_named(self):
        loop, other = self.path("loop"), self.path("pool")
        os.symlink(other, loop)
        os.symlink(loop, other)
        for path in (loop, os.path.join(loop, "under"), self.path("x" * 300)):
            for option, command in self.outputs(path).items():
                with self.subTest(path=path, option=option):
                    run = self.ferry(*command)
                    self.assertEqual(run.code, USAGE, run.err)
                    self.assertIn(loop if path.startswith(loop) else path, run.err)
                    self.assertNotIn("filesystem error", run.err)
        self.assertTrue(os.path.islink(loop))

    def test_what_is_no_file_is_refused_and_stays(self):
        device, fifo, link = self.path("null"), self.path("fifo"), self.path("link")
        os.mkfifo(fifo)
        os.symlink("/dev/null", link)
        kinds = [(fifo, stat.S_ISFIFO), (link, stat.S_ISCHR)]
        try:
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
            kinds.append((device, stat.S_ISCHR))
        except OSError:
            pass  # not root
        for path, is_still in kinds:
            for option, command in self.outputs(path).items():
                with self.subTest(path=path, option=option):
                    run = self.ferry(*command)
                    self.assertEqual(run.code, USAGE, run.err)
                    self.assertIn(path, run.err)
                    self.assertTrue(is_still(os.stat(path).st_mode))

    def test_a_pipe_is_read_whole(self):
        """`ferry data <(command)`: nothing looks into it first."""
        fifo, out = self.path("text-fifo"), self.path("piped.bin")
        os.mkfifo(fifo)
        with open(self.path("text.txt"), "rb") as file:
            text = file.read()
        with subprocess.Popen([FERRY, "data", fifo, "-o", out], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
            with open(fifo, "wb") as file:
                file.write(text)
            _, err = run.communicate(timeout=30)
        self.assertEqual(run.returncode, 0, err)
        with open(out, "rb") as file, open(self.path("tokens.bin"), "rb") as whole:
            self.assertEqual(file.read(), whole.read())

    def test_a_link_to_nothing_is_the_file_that_it_names(self):
        out, link, folder = self.path("new.safetensors"), self.path("to-new"), self.path("new-export")
        os.symlink(out, link)
        self.refused_before("two results would go into one file", self.config(steps=1),
                            "--weights-out", link, "--trace", out)
        os.remove(link)
        os.symlink(os.path.join("new-export", "n.safetensors"), link)
        os.mkdir(folder)
        self.refused_before("among the files of --export", self.config(steps=1),
                            "--weights-out", link, "--export", folder)
        self.assertEqual(os.listdir(folder), [])

    def test_the_files_of_a_volume_are_no_outputs(self):
        config = self.config(steps=1, budgets__host="300KiB", budgets__nvme=[self.nvme()])
        link = self.path("to-slot-file")
        os.symlink(os.path.join("nvme", "ferry.slots1"), link)
        named = [(option, self.path(os.path.join("nvme", name))) for option in ("--weights-out", "--trace", "--export")
                 for name in ("ferry.volume", "ferry.slots0", "ferry.slots12")]
        for option, path in (*named, ("--weights-out", link)):
            with self.subTest(option=option, path=path):
                self.refused_before("budgets.nvme", config, option, path)
        self.assertEqual(os.listdir(self.path("nvme")), [])
        # Any other name beside them, and these names elsewhere.
        os.mkdir(self.path("elsewhere"))
        for path in (self.path("nvme/weights"), self.path("elsewhere/ferry.slots0")):
            self.assert_trained(self.train(config, "--weights-out", path))
            self.assertGreater(os.path.getsize(path), 0)
            os.remove(path)

    def refused_before(self, words, config, *arguments):
        """Before the first step, and nothing is written."""
        run = self.train(config, *arguments)
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn(words, run.err)
        self.assertEqual(run.steps, [])

    @contextlib.contextmanager
    def held(self, how, path):
        """Through which command the file at this path cannot be replaced; None: not on this machine."""
        if how == "immutable":
            able = shutil.which("chattr") and subprocess.run(["chattr", "+i", path], check=False).returncode == 0
            try:
                yield [] if able else None
            finally:
                subprocess.run(["chattr", "-i", path], check=False)
        elif how == "mounted":
            through = ["unshare", "-rm", "sh", "-c", f"mount --bind '{path}' '{path}' && exec \"$@\"", "sh"]
            able = shutil.which("unshare") and subprocess.run([*through, "true"], check=False).returncode == 0
            yield through if able else None
        else:
            # Root's, in a sticky directory, and the run is another user's.
            if os.geteuid() != 0 or not shutil.which("setpriv"):
                yield None
                return
            os.chmod(self.dir, 0o1777)
            for name in ("text.txt", "tokens.bin"):
                os.chmod(self.path(name), 0o644)
            os.chmod(self.path("nvme"), 0o777)
            yield ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
            os.chmod(self.dir, 0o755)

    def test_what_cannot_be_replaced_is_refused_before_the_work(self):
        model = self.path("model-of-eval")
        self.assert_trained(self.train(self.config(steps=1), "--export", model))
        for name in ("weights", "trace", "tokens", "machine.json", "svg", "logits"):
            with open(self.path(name), "wb"):
                pass
        commands = [["data", self.path("text.txt"), "-o", self.path("tokens")],
                    [*self.command(self.config(steps=1)), "--trace", self.path("trace")],
                    [*self.command(self.config(steps=1)), "--weights-out", self.path("weights")],
                    ["eval", model, self.path("tokens.bin"), "--set", "batch.sequence=32", "--logits",
                     self.path("logits")],
                    ["plan", self.command(self.config())[1], "--svg", self.path("svg")],
                    ["bench", "io", self.path("nvme"), "--size", "16MiB", "--plot", self.path("svg")],
                    ["bench", "io", self.path("nvme"), "--size", "16MiB", "--save", self.path("machine.json")]]
        with open(self.path("machine.json"), "w", encoding="ascii") as file:
            file.write('{"ferry_machine": 1}')
        for how in ("immutable", "mounted", "sticky"):
            for command in commands:
                path = command[-1]
                before = os.stat(path)
                with self.subTest(how=how, command=command[0], option=command[-2]), self.held(how, path) as through:
                    if through is None:
                        continue
                    run = self.ferry(*command, through=through)
                    self.assertEqual(run.code, USAGE, run.err)
                    for text in (path, "cannot be replaced", {"mounted": "mount point"}.get(how, how)):
                        self.assertIn(text, run.err)
                    self.assertEqual(run.out, "", "it worked before it refused")
                after = os.stat(path)
                self.assertEqual((before.st_ino, before.st_mtime_ns), (after.st_ino, after.st_mtime_ns))
        self.assertEqual([name for name in os.listdir(self.dir) if re.search(r"\.[0-9a-f]{16}\.part$", name)], [])

    def test_a_directory_that_gives_no_names_takes_no_export(self):
        for name in ("here", "new"):
            above = self.path("fixed")
            os.makedirs(os.path.join(above, "here"))
            held = above if name == "new" else os.path.join(above, "here")
            try:
                if not shutil.which("chattr") or subprocess.run(["chattr", "+a", held], check=False).returncode:
                    self.skipTest("no chattr here")
                run = self.train(self.config(steps=1), "--export", os.path.join(held, "out" if name == "new" else "."))
            finally:
                subprocess.run(["chattr", "-a", held], check=False)
            self.assertEqual(os.listdir(os.path.join(above, "here")), [])
            if name == "here":
                self.assertEqual(run.code, USAGE, run.err)
                self.assertIn("append-only", run.err)
                self.assertEqual(run.steps, [])
            else:
                self.assert_trained(run)  # a new directory is no append-only one
            shutil.rmtree(above)

    def test_the_users_own_files_stay(self):
        out = self.path("w.safetensors")
        for name in ("w.safetensors.part", "precious"):
            with open(self.path(name), "w", encoding="ascii") as file:
                file.write(name)
        os.symlink("precious", self.path("t.json.part"))
        run = self.train(self.config(steps=1), "--weights-out", out, "--trace", self.path("t.json"))
        self.assert_trained(run)
        for name in ("w.safetensors.part", "precious"):
            with open(self.path(name), encoding="ascii") as file:
                self.assertEqual(file.read(), name)

    def test_two_runs_that_write_one_name(self):
        out = self.path("both.safetensors")
        def weights(seed):
            alone = self.path(f"alone{seed}.safetensors")
            self.assert_trained(self.train(self.config(steps=2, seed=seed), "--weights-out", alone))
            with open(alone, "rb") as file:
                return file.read()
        whole = [weights(seed) for seed in (1, 2)]
        for _ in range(3):
            runs = [subprocess.Popen([FERRY, *self.command(self.config(steps=2, seed=seed)), "--weights-out", out],
                                     stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for seed in (1, 2)]
            for run in runs:
                _, err = run.communicate(timeout=60)
                self.assertEqual(run.returncode, 0, err)
            with open(out, "rb") as file:
                self.assertIn(file.read(), whole)
        self.assertEqual(glob.glob(out + ".*"), [])

    def test_two_runs_that_export_to_one_directory(self):
        out = self.path("exported")
        os.mkdir(out)
        first = start([FERRY, *self.command(self.config(steps=100000)), "--export", out])
        first.stdout.readline()
        second = self.train(self.config(steps=1), "--export", out)
        self.assertEqual(second.code, USAGE, second.err)
        self.assertIn("another ferry", second.err)
        first.send_signal(signal.SIGINT)
        _, err = first.communicate(timeout=60)
        self.assertEqual(first.returncode, 0, err)
        self.assertEqual(sorted(os.listdir(out)), ["config.json", "model.safetensors"])

    def as_another_user(self):
        """A directory of a user's own, and through which command to be that user."""
        own = self.path("own")
        os.mkdir(own)
        self.addCleanup(shutil.rmtree, own)
        if os.geteuid() != 0:
            return own, []
        if not shutil.which("setpriv"):
            self.skipTest("no setpriv here")
        os.chown(own, 65534, 65534)
        os.chmod(self.dir, 0o755)
        for name in ("text.txt", "tokens.bin"):
            os.chmod(self.path(name), 0o644)
        return own, ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]

    def test_what_cannot_be_read_is_not_taken_for_empty(self):
        own, through = self.as_another_user()
        train = self.command(self.config(steps=1))
        commands = [["data", self.path("text.txt"), "-o"], [*train, "--weights-out"], [*train, "--trace"],
                    ["plan", train[1], "--svg"]]
        for mode in (0o000, 0o600) if through else (0o000,):
            for i, command in enumerate(commands):
                path = os.path.join(own, f"notes{i}-{mode}")
                with open(path, "w", encoding="ascii") as file:
                    file.write("precious notes")
                os.chmod(path, mode)
                if through and mode == 0o000:
                    os.chown(path, 65534, 65534)
                with self.subTest(command=command[0], option=command[-1], mode=mode):
                    run = self.ferry(*command, path, through=through)
                    self.assertEqual(run.code, USAGE, run.err)
                    for text in (path, "whose it is cannot be told", "Permission denied"):
                        self.assertIn(text, run.err)
                    self.assertEqual(run.out, "", "it worked before it refused")
                os.chmod(path, 0o600)
                with open(path, encoding="ascii") as file:
                    self.assertEqual(file.read(), "precious notes")
        # Where nothing is in it nothing can be lost.
        empty = os.path.join(own, "empty")
        with open(empty, "wb"):
            os.chmod(empty, 0o200)
        run = self.ferry("data", self.path("text.txt"), "-o", empty, through=through)
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(os.stat(empty).st_mode & 0o777, 0o200)

    def while_it_runs(self, change, *arguments):
        """A run of two steps and more, and what happened between the first one and its end."""
        process = start([FERRY, *self.command(self.config(steps=100000)), *arguments])
        out = process.stdout.readline()
        change()
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
        return Run(process.returncode, out + rest, err)

    def test_an_export_never_mixes_with_another_ones(self):
        out, moved = self.path("mixed"), self.path("moved")
        other = self.config(steps=1, seed=99)
        for away in (shutil.rmtree, lambda path: os.rename(path, moved)):
            def change(away=away):
                away(out)
                self.assert_trained(self.train(other, "--export", out))
            run = self.while_it_runs(change, "--export", out, "--shard-size", "20KB")
            self.assertEqual(run.code, IO, run.err)
            for text in (out, "removed or replaced"):
                self.assertIn(text, run.err)
            self.assertIsNotNone(run.summary)
            self.assertEqual(sorted(os.listdir(out)), ["config.json", "model.safetensors"])
            self.assertIn("model.safetensors.index.json", os.listdir(self.saved_beside(out, run)))
            shutil.rmtree(out)
        self.assertEqual(os.listdir(moved), [])

    def saved_beside(self, out, run):
        """The directory of an export that lost its place: the run's own, and no other's."""
        saved = re.search(r"the whole export is in (\S+): move it to another name", run.err)
        self.assertIsNotNone(saved, run.err)
        self.assertRegex(saved[1], re.escape(out) + r"\.\w{6}$")
        self.assertEqual(os.stat(saved[1]).st_mode & 0o777, 0o700)
        return saved[1]

    def test_an_export_that_lost_its_place_is_whole_beside_it(self):
        out, weights = self.path("lost"), self.path("lost.safetensors")
        run = self.while_it_runs(lambda: os.rmdir(out), "--export", out + "/", "--export-type", "fp32",
                                 "--weights-out", weights)
        self.assertEqual(run.code, IO, run.err)
        for text in (out, "removed or replaced", "No such file"):
            self.assertIn(text, run.err)
        saved = self.saved_beside(out, run)
        self.assertEqual(sorted(os.listdir(saved)), ["config.json", "model.safetensors"])
        self.assertFalse(os.path.exists(out))
        # Its values are those of the run: those of the file beside it, tensor for tensor.
        with open(os.path.join(saved, "model.safetensors"), "rb") as one, open(weights, "rb") as other:
            self.assertEqual(one.read(), other.read())
        self.assertIsNotNone(run.summary)

    def test_an_export_beside_which_there_is_no_room_says_what_is_left(self):
        own, through = self.as_another_user()
        above = os.path.join(own, "above")
        out = os.path.join(above, "model")
        os.mkdir(above)
        if through:
            os.chown(above, 65534, 65534)
        config = self.config(budgets__nvme=[{"path": own, "size": "64MiB"}], budgets__host="300KiB",
                             checkpoint__durable_steps=True, schedule__kind="constant", schedule__warmup_steps=0)
        for durable, words in ((True, "--resume with --weights-out or --export"), (False, "durable_steps keeps them")):
            config["checkpoint"]["durable_steps"] = durable
            process = start([*through, FERRY, *self.command({**config, "steps": 100000}), "--export", out])
            printed = process.stdout.readline()
            os.rmdir(out)
            os.chmod(above, 0o555)
            process.send_signal(signal.SIGINT)
            rest, err = process.communicate(timeout=60)
            run = Run(process.returncode, printed + rest, err)
            os.chmod(above, 0o755)
            self.assertEqual(run.code, IO, run.err)
            self.assertIn(words, run.err)
            self.assertIsNotNone(run.summary)
            self.assertEqual(os.listdir(above), [])
            if durable:  # what the message says is so
                last = run.steps[-1]["step"]
                config["checkpoint"]["durable_steps"] = True
                again = self.ferry(*self.command({**config, "steps": last}), "--resume", "--export", out, through=through)
                self.assert_trained(again)
                self.assertEqual([step["step"] for step in again.steps], [last])
                self.assertEqual(again.hashes, run.hashes)
                self.assertIn("model.safetensors", os.listdir(out))
                shutil.rmtree(out)
                for name in glob.glob(os.path.join(own, "ferry.*")):
                    os.remove(name)


    def test_an_export_replaces_nothing_that_came_during_the_run(self):
        target = self.path("elsewhere.txt")
        for name in ("config.json", "model.safetensors", "tokenizer.json", "link"):
            out = self.path("came-" + name)
            placed = os.path.join(out, "model.safetensors" if name == "link" else name)
            def change(name=name, placed=placed):
                if name == "link":
                    os.symlink(target, placed)
                with open(placed, "w", encoding="ascii") as file:
                    file.write("precious")
            with self.subTest(name=name):
                run = self.while_it_runs(change, "--export", out)
                with open(placed, encoding="ascii") as file:
                    self.assertEqual(file.read(), "precious")
                self.assertIsNotNone(run.summary)
                if name == "tokenizer.json":  # no file of this export: it is in nobody's way
                    self.assertEqual(run.code, 0, run.err)
                    self.assertIn("model.safetensors", os.listdir(out))
                else:
                    self.assertEqual(run.code, IO, run.err)
                    self.assertIn(out, run.err)
                    self.assertEqual(os.listdir(out), [os.path.basename(placed)])
                    self.assertIn("model.safetensors", os.listdir(self.saved_beside(out, run)))

    def test_results_replace_nothing_that_came_during_the_run(self):
        for option in ("--weights-out", "--trace"):
            path = self.path("came" + option)
            def change(path=path):
                with open(path, "w", encoding="ascii") as file:
                    file.write("precious notes")
            run = self.while_it_runs(change, option, path)
            self.assertEqual(run.code, USAGE, run.err)
            self.assertIsNotNone(run.summary)
            with open(path, encoding="ascii") as file:
                self.assertEqual(file.read(), "precious notes")
            for text in (path, "another kind"):
                self.assertIn(text, run.err)

    def test_what_is_printed_goes_into_no_output(self):
        train = self.command(self.config(steps=1))
        path = self.path("printed")
        for command, to in (([*train, "--trace", path], f">{path}"), ([*train, "--trace", "/dev/stdout"], f">{path}"),
                            ([*train, "--weights-out", path], f"2>{path}"),
                            (["data", self.path("text.txt"), "-o", "/dev/stdout"], f">{path}")):
            with self.subTest(command=command, to=to):
                run = subprocess.run(["bash", "-c", f'"$0" "$@" {to}', FERRY, *command], capture_output=True,
                                     text=True, timeout=60, check=False)
                self.assertEqual(run.returncode, USAGE, run.stderr)
                with open(path, encoding="ascii") as file:
                    said = run.stderr + file.read()
                self.assertIn("standard stream", said)
                self.assertEqual(glob.glob(path + ".*"), [])

    def test_an_open_file_without_a_name_is_no_output(self):
        before = set(os.listdir("/"))
        gone = self.path("gone")
        run = subprocess.run(["bash", "-c", f'exec 1>{gone}; rm {gone}; exec "$0" data "$1" -o /dev/stdout', FERRY,
                              self.path("text.txt")], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(run.returncode, USAGE, run.stderr)
        self.assertIn("/dev/stdout", run.stderr)
        self.assertEqual(glob.glob(gone + "*"), [])
        memory = os.memfd_create("tok")
        run = self.ferry("data", self.path("text.txt"), "-o", f"/dev/fd/{memory}", pass_fds=(memory,))
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn("no name", run.err)
        self.assertEqual(os.fstat(memory).st_size, 0)
        self.assertEqual(set(os.listdir("/")), before)
        os.close(memory)

    def test_an_interrupt_leaves_no_draft(self):
        fifo, out = self.path("slow-text"), self.path("interrupted.bin")
        os.mkfifo(fifo)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with subprocess.Popen([FERRY, "data", fifo, "-o", out], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE) as run:
                with open(fifo, "wb") as file:
                    file.write(b"some text")
                    file.flush()
                    self.assertEqual(len(glob.glob(out + ".*.part")), 1)
                    run.send_signal(number)
                    run.communicate(timeout=30)
            self.assertEqual(run.returncode, -number)
            self.assertEqual(glob.glob(out + "*"), [])
        # Whoever started it wanted it to go on.
        with subprocess.Popen(["bash", "-c", 'trap "" HUP INT; exec "$0" "$@"', FERRY, "data", fifo, "-o", out],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
            with open(fifo, "wb") as file:
                for number in (signal.SIGINT, signal.SIGHUP):
                    run.send_signal(number)
                file.write(b"some text")
            run.communicate(timeout=30)
        self.assertEqual(run.returncode, 0)
        self.assertTrue(os.path.exists(out))

    def test_a_trace_that_does_not_fit(self):
        trace = self.path("full.json")
        whole = self.train(self.config(steps=2))
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        for there in (False, True):
            if there:
                with open(trace, "w", encoding="ascii") as file:
                    file.write('{"displayTimeUnit":"ms"}')
            run = self.train(self.config(steps=2), "--trace", trace, preexec_fn=limit)
            self.assertEqual(run.code, IO, run.err)
            self.assertIn("the trace cannot be written", run.err)
            self.assertIn(trace, run.err)
            self.assertEqual(run.numbers(), whole.numbers(), "the result does not depend on it")
            self.assertEqual(os.path.exists(trace), there)
            self.assertEqual(glob.glob(trace + ".*"), [])
        with open(trace, encoding="ascii") as file:
            self.assertEqual(json.load(file), {"displayTimeUnit": "ms"})


class ClosedStreamsTest(FerryTest):
    def closed(self, arguments, *streams):
        """A run with these streams closed when it starts, as by `>&-`."""
        redirections = " ".join(f"{stream}>&-" for stream in streams)
        return subprocess.run(["bash", "-c", f'exec "$0" "$@" {redirections}', FERRY, *arguments],
                              capture_output=True, text=True, timeout=120, check=False)

    def test_the_durable_state_is_not_written_over(self):
        drive = self.path("durable")
        given = {"steps": 6, "clip_norm": 1.0, "budgets__host": "300KiB", "checkpoint__durable_steps": True,
                 "schedule__kind": "constant", "schedule__warmup_steps": 0,
                 "budgets__nvme": [{"path": drive, "size": "64MiB"}]}
        whole = self.train(self.config(**{**given, "steps": 9, "checkpoint__durable_steps": False,
                                          "budgets__nvme": [self.nvme()]}))
        self.assert_trained(whole)
        for streams in ((1,), (2,), (1, 2), (0, 1, 2)):
            with self.subTest(streams=streams):
                os.mkdir(drive)
                run = self.closed(self.command(self.config(**given)), *streams)
                self.assertEqual(run.returncode, 0, run.stderr)
                with open(os.path.join(drive, "ferry.volume"), "rb") as file:
                    self.assertEqual(file.read(8), b"ferryvol")
                resumed = self.train(self.config(**{**given, "steps": 9}), "--resume")
                self.assert_trained(resumed)
                self.assertEqual(resumed.hashes, whole.hashes)
                shutil.rmtree(drive)

    def test_outputs_hold_nothing_that_was_printed(self):
        for streams in ((1,), (2,), (0, 1, 2)):
            out = self.path("closed.bin")
            run = self.closed(["data", self.path("text.txt"), "-o", out], *streams)
            self.assertEqual(run.returncode, 0, run.stderr)
            with open(out, "rb") as file, open(self.path("tokens.bin"), "rb") as whole:
                self.assertEqual(file.read(), whole.read())

    def test_examples_that_open_volumes(self):
        folder = self.path("examples")
        os.mkdir(folder)
        for name in ("example_minimal", "example_leases"):
            program = os.path.join(os.environ.get("FERRY_BUILD_DIR", ""), name)
            if not os.path.exists(program):
                continue
            run = subprocess.run(["bash", "-c", 'exec "$0" "$1" 0>&- 1>&- 2>&-', program, folder],
                                 capture_output=True, text=True, timeout=120, check=False)
            self.assertEqual(run.returncode, 0, name)


if __name__ == "__main__":
    unittest.main()
