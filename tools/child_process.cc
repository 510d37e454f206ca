#include "child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "ferry/base.h"
#include "interrupt.h"

namespace ferry::tools {

ChildProcess::ChildProcess(const std::vector<std::string>& words) {
    std::array<std::array<int, 2>, 2> pipes{};
    for (auto& ends : pipes) FERRY_CHECK(pipe2(ends.data(), O_CLOEXEC) == 0);
    posix_spawn_file_actions_t actions{};
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, pipes[0][1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, pipes[1][1], STDERR_FILENO);
    // A group of its own keeps the terminal's Ctrl-C away from it: run() passes it on. What this
    // program ignores, it need not.
    posix_spawnattr_t attributes{};
    posix_spawnattr_init(&attributes);
    sigset_t usual{};
    sigemptyset(&usual);
    sigaddset(&usual, SIGPIPE);
    sigaddset(&usual, SIGXFSZ);
    posix_spawnattr_setsigdefault(&attributes, &usual);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
    std::vector<std::string> copies = words;
    std::vector<char*> arguments;
    arguments.reserve(copies.size() + 1);
    for (std::string& word : copies) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    const int status =
        posix_spawnp(&pid_, arguments[0], &actions, &attributes, arguments.data(), environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    for (size_t i = 0; i < pipes.size(); ++i) {
        close(pipes[i][1]);
        ends_[i] = pipes[i][0];
    }
    if (status != 0) {
        for (const int end : ends_) close(end);
        throw Error(Trouble::usage, {.what = "a program cannot be started",
                                     .where = words.front(),
                                     .measured = std::strerror(status)});
    }
}

ChildProcess::~ChildProcess() {
    for (const int end : ends_) close(end);
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
}

int ChildProcess::run(const Sink& sink, int request) {
    std::array<pollfd, 2> streams{pollfd{.fd = ends_[0], .events = POLLIN, .revents = 0},
                                  pollfd{.fd = ends_[1], .events = POLLIN, .revents = 0}};
    int told = 0;
    const auto open = [](const pollfd& stream) { return stream.fd >= 0; };
    while (std::ranges::any_of(streams, open)) {
        if (requests() > told) {
            kill(pid_, told == 0 ? request : SIGTERM);
            if (told++ == 0) catch_interrupts();
        }
        poll(streams.data(), streams.size(), 100);
        for (size_t i = 0; i < streams.size(); ++i) {
            if (!open(streams[i]) || streams[i].revents == 0) continue;
            std::array<char, 65536> bytes{};
            const ssize_t count = read(streams[i].fd, bytes.data(), bytes.size());
            if (count > 0) {
                sink(static_cast<int>(i) + 1, {bytes.data(), static_cast<size_t>(count)});
            } else if (count == 0 || errno != EINTR) {
                streams[i].fd = -1;
            }
        }
    }
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::string program_path(const std::string& name) {
    const char* path = std::getenv("PATH");
    std::istringstream directories(path ? path : "");
    for (std::string directory; std::getline(directories, directory, ':');) {
        std::string file = (directory.empty() ? "." : directory) + "/" + name;
        if (access(file.c_str(), X_OK) == 0) return file;
    }
    return "";
}

std::string shell_line(const std::vector<std::string>& words) {
    constexpr std::string_view kPlain =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+,./:@%";
    std::string line;
    for (const std::string& word : words) {
        if (!line.empty()) line += ' ';
        if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) {
            line += word;
            continue;
        }
        line += '\'';
        for (const char c : word) line += c == '\'' ? std::string("'\\''") : std::string(1, c);
        line += '\'';
    }
    return line;
}

}  // namespace ferry::tools
