// A program started by this one, whose output comes here as it is written.
#pragma once

#include <sys/types.h>

#include <array>
#include <csignal>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::tools {

class ChildProcess {
public:
    // Looks for words[0] along PATH. Its standard input is empty. Where the calling thread ends
    // first, killed or not, it gets SIGTERM. Throws Trouble::usage where it cannot be started.
    explicit ChildProcess(const std::vector<std::string>& words);
    ~ChildProcess();  // kills it unless it has ended
    ChildProcess(const ChildProcess&) = delete;
    ChildProcess& operator=(const ChildProcess&) = delete;

    // Hands over what it writes, stream 1 (standard output) or 2, until its end. An interrupt of
    // this program is passed on to it as `request`, a second one as SIGTERM. Its exit code; of a
    // signal 128 + number.
    using Sink = std::function<void(int stream, std::string_view bytes)>;
    int run(const Sink& sink, int request = SIGTERM);

private:
    pid_t pid_ = -1;
    std::array<int, 2> ends_{-1, -1};
};

// The file of a program along PATH; empty: none.
std::string program_path(const std::string& name);

// Words as a shell takes them.
std::string shell_line(const std::vector<std::string>& words);
// The same for a terminal: what would steer it as bash, ksh and zsh write it, $'\x1b'.
std::string shown_shell_line(const std::vector<std::string>& words);

}  // namespace ferry::tools
