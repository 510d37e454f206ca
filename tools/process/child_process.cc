#include "child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spdlog/fmt/fmt.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "base/text.h"
#include "ferry/error.h"
#include "interrupt.h"

namespace ferry::tools {

namespace {

// In the child, between fork and exec. Returns where the program cannot be started.
void become(char* const* arguments, pid_t parent, int out, int err) {
    // A group of its own keeps the terminal's Ctrl-C away from it: run() passes it on. What this
    // program ignores, it need not.
    setpgid(0, 0);
    std::signal(SIGPIPE, SIG_DFL);
    std::signal(SIGXFSZ, SIG_DFL);
    // The kernel ends it with this program, which may be gone already.
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(1);
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup2(nothing, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    execvp(arguments[0], arguments);
}

}  // namespace

ChildProcess::ChildProcess(const std::vector<std::string>& words) {
    std::array<std::array<int, 2>, 3> pipes{};  // its two streams, and why it did not start
    for (auto& ends : pipes) FERRY_CHECK(pipe2(ends.data(), O_CLOEXEC) == 0);
    std::vector<std::string> copies = words;
    std::vector<char*> arguments;
    arguments.reserve(copies.size() + 1);
    for (std::string& word : copies) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ == 0) {
        become(arguments.data(), parent, pipes[0][1], pipes[1][1]);
        const int reason = errno;
        const ssize_t told = write(pipes[2][1], &reason, sizeof(reason));
        _exit(told > 0 ? 127 : 1);
    }
    int reason = pid_ < 0 ? errno : 0;
    for (const auto& ends : pipes) close(ends[1]);
    while (pid_ > 0 && read(pipes[2][0], &reason, sizeof(reason)) < 0 && errno == EINTR) {
    }
    close(pipes[2][0]);
    ends_ = {pipes[0][0], pipes[1][0]};
    if (reason == 0) return;
    for (const int end : ends_) close(end);
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
    throw Error(Trouble::usage, {.what = "a program cannot be started",
                                 .where = words.front(),
                                 .measured = std::strerror(reason)});
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

std::string shown_shell_line(const std::vector<std::string>& words) {
    std::string line;
    for (const std::string& word : words) {
        if (!line.empty()) line += ' ';
        if (one_line(word) == word) {
            line += shell_line({word});
            continue;
        }
        line += "$'";
        for (const char c : word) {
            const auto byte = static_cast<unsigned char>(c);
            if (c == '\'' || c == '\\') line += '\\';
            if (byte < ' ' || byte >= 0x7f)
                line += fmt::format("\\x{:02x}", byte);
            else
                line += c;
        }
        line += '\'';
    }
    return line;
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
