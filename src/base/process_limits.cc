#include "base/process_limits.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <latch>
#include <limits>
#include <system_error>
#include <thread>
#include <vector>

#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry {
namespace {

// "max", or no such file: no limit.
void keep_least(const std::string& file, int64_t& least) {
    int64_t found = 0;
    if (std::ifstream(file) >> found) least = std::min(least, found);
}

// A limit of any ancestor holds too. Inside a container the named group may be out of sight: the
// mount point then is the container's own.
int64_t least_pids_max(const std::string& root) {
    int64_t least = std::numeric_limits<int64_t>::max();
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {  // hierarchy:controllers:group
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        if (!controllers.empty() && controllers != "pids") continue;
        const std::string mount =
            root + "/sys/fs/cgroup" + (controllers.empty() ? "" : "/" + controllers);
        std::string group = line.substr(second + 1);
        while (!group.empty()) {
            keep_least(mount + group + "/pids.max", least);
            group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
        }
        keep_least(mount + "/pids.max", least);
    }
    return least;
}

// 0: no limit, or unknown.
int64_t own_stack_bytes() {
    rlimit limit{};
    if (getpid() == gettid()) {  // the first thread's grows up to it
        const bool limited =
            getrlimit(RLIMIT_STACK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
        return limited ? static_cast<int64_t>(limit.rlim_cur) : 0;
    }
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) return 0;
    size_t bytes = 0;
    pthread_attr_getstacksize(&attributes, &bytes);
    pthread_attr_destroy(&attributes);
    return static_cast<int64_t>(std::min<size_t>(bytes, std::numeric_limits<int64_t>::max()));
}

}  // namespace

std::string address_space_limit() {
    rlimit limit{};
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
    return format_bytes(static_cast<int64_t>(limit.rlim_cur)) +
           " of address space for the process (ulimit -v)";
}

std::string reached_file_limit() {
    const int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (file >= 0) close(file);
    rlimit limit{};
    if (file >= 0 || errno != EMFILE || getrlimit(RLIMIT_NOFILE, &limit) != 0) return {};
    return std::to_string(limit.rlim_cur) + " open files of the process (ulimit -n)";
}

std::string limit_behind(int error) {
    rlimit limit{};
    if (error == ENOMEM) return address_space_limit();
    if (error == EAGAIN) return thread_limits();
    const bool of_files = error == EMFILE;
    if (!of_files && error != EFBIG) return {};
    if (getrlimit(of_files ? RLIMIT_NOFILE : RLIMIT_FSIZE, &limit) != 0 ||
        limit.rlim_cur == RLIM_INFINITY)
        return {};
    return std::to_string(limit.rlim_cur) + (of_files
                                                 ? " open files of the process (ulimit -n)"
                                                 : " bytes in a file of the process's (ulimit -f)");
}

Trouble trouble_of_reading(int error) {
    if (error == EIO) return Trouble::io;
    return limit_behind(error).empty() ? Trouble::usage : Trouble::does_not_fit;
}

std::string thread_limits(const std::string& root) {
    std::string text;
    rlimit limit{};
    if (getrlimit(RLIMIT_NPROC, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        text = std::to_string(limit.rlim_cur) + " processes and threads of the user (ulimit -u" +
               (geteuid() == 0 ? ", which does not bind root)" : ")");
    const int64_t pids = least_pids_max(root);
    if (pids != std::numeric_limits<int64_t>::max())
        text += (text.empty() ? "" : ", ") + std::to_string(pids) +
                " processes and threads of the control group (pids.max)";
    return text.empty() ? "the machine's threads (kernel.threads-max, vm.max_map_count)" : text;
}

void refuse_thread(std::string_view where, std::string_view reason) {
    std::string limits = thread_limits();
    // The stack of a thread takes address space.
    if (const std::string space = address_space_limit(); !space.empty()) limits += ", " + space;
    throw Error(Trouble::does_not_fit, {.what = "a thread cannot be started",
                                        .where = std::string(where),
                                        .measured = std::string(reason),
                                        .limit = std::move(limits),
                                        .remedy = "raise that limit, or end other processes"});
}

void require_threads(int count, std::string_view where) {
    std::latch over(1);
    std::vector<std::jthread> threads;  // joined after `over` was counted down
    std::string failed;
    try {
        for (int i = 0; i < count; ++i) threads.emplace_back([&over] { over.wait(); });
    } catch (const std::system_error& error) {
        failed = error.what();
    }
    over.count_down();
    threads.clear();
    if (!failed.empty()) refuse_thread(where, failed);
}

void require_stack() {
    const int64_t bytes = own_stack_bytes();
    if (bytes == 0 || bytes >= kStackBytes) return;
    throw Error(Trouble::does_not_fit,
                {.what = "the stack is too small",
                 .where = "the thread that calls ferry",
                 .measured = format_bytes(kStackBytes) + " are needed",
                 .limit = format_bytes(bytes) + " (ulimit -s, or what started the thread)",
                 .remedy = "raise it: ulimit -s 8192"});
}

}  // namespace ferry
