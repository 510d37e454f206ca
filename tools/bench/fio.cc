#include "fio.h"

#include <fcntl.h>
#include <poll.h>
#include <spdlog/fmt/fmt.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>

#include "base/json_reader.h"
#include "tools/process/interrupt.h"

namespace ferry::tools {
namespace {

// The machine's real time, as in fio's own time stamps.
double real_seconds() {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now).count();
}

struct CpuSample {
    double at = 0, cpu_seconds = 0;
};

// A child with its output, standard error included, and the CPU time that its process takes.
class Child {
public:
    explicit Child(const std::vector<std::string>& words) {
        int ends[2];
        FERRY_CHECK(pipe2(ends, O_CLOEXEC) == 0);
        const pid_t parent = getpid();
        pid_ = fork();
        FERRY_CHECK(pid_ >= 0, "fork");
        if (pid_ == 0) become(words, ends[1], parent);
        close(ends[1]);
        output_ = ends[0];
    }
    ~Child() {
        if (pid_ > 0) stop();
        close(output_);
    }
    Child(const Child&) = delete;
    Child& operator=(const Child&) = delete;

    // Until its end, or an interrupt. The wait status.
    int wait() {
        clockid_t clock{};
        const bool has_clock = clock_getcpuclockid(pid_, &clock) == 0;
        while (!interrupted() && read_some()) {
            timespec cpu{};
            if (has_clock && clock_gettime(clock, &cpu) == 0)
                samples_.push_back({real_seconds(), static_cast<double>(cpu.tv_sec) +
                                                        1e-9 * static_cast<double>(cpu.tv_nsec)});
        }
        return stop();
    }
    const std::string& text() const noexcept { return text_; }
    // CPU seconds a second, of the process between two times. 0: it was not sampled often enough.
    double cpu_rate(double begin, double end) const {
        const auto after = [](const CpuSample& sample, double at) { return sample.at < at; };
        const auto first = std::lower_bound(samples_.begin(), samples_.end(), begin, after);
        auto last = std::lower_bound(samples_.begin(), samples_.end(), end, after);
        if (last == samples_.begin() || first >= last - 1) return 0;
        --last;
        return (last->cpu_seconds - first->cpu_seconds) / (last->at - first->at);
    }

private:
    // In the child. A process group of its own keeps the terminal's Ctrl-C away from it: whoever
    // started it decides. It ends with whoever started it.
    [[noreturn]] static void become(const std::vector<std::string>& words, int output,
                                    pid_t parent) {
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(127);
        // Without huge pages fio's transfers reach a device in small pieces, and it would be the
        // slower one for that alone.
        setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", 1);
        dup2(output, STDOUT_FILENO);
        dup2(output, STDERR_FILENO);
        std::vector<char*> arguments;
        arguments.reserve(words.size() + 1);
        for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
        arguments.push_back(nullptr);
        execvp(arguments[0], arguments.data());
        _exit(127);
    }

    // Waits a little for output; false at its end.
    bool read_some() {
        constexpr int kTickMs = 10;
        pollfd ready{.fd = output_, .events = POLLIN, .revents = 0};
        if (poll(&ready, 1, kTickMs) <= 0) return true;
        char buffer[4096];
        const ssize_t got = read(output_, buffer, sizeof buffer);
        if (got < 0) return errno == EINTR;
        text_.append(buffer, static_cast<size_t>(got));
        return got > 0;
    }

    int stop() {
        if (interrupted()) kill(pid_, SIGKILL);
        int status = 0;
        while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
        }
        pid_ = -1;
        return status;
    }

    pid_t pid_ = -1;
    int output_ = -1;
    std::string text_{};
    std::vector<CpuSample> samples_{};
};

const char* direction_of(AccessPattern access) {
    switch (access.direction) {
        case Direction::read:
            return access.random ? "randread" : "read";
        case Direction::write:
            return access.random ? "randwrite" : "write";
        case Direction::mixed:
            return access.random ? "randrw" : "rw";
    }
    return "";
}

// A colon separates names in fio's list.
std::string escaped(const std::string& name) {
    std::string out;
    for (const char c : name) {
        if (c == ':' || c == '\\') out += '\\';
        out += c;
    }
    return out;
}

const std::vector<std::string> kFlags{"--ioengine=io_uring", "--fixedbufs",    "--registerfiles",
                                      "--norandommap",       "--randrepeat=0", "--gtod_reduce=1"};

std::vector<std::string> words_of(const FioJob& job) {
    std::vector<std::string> words{"fio"};
    words.insert(words.end(), kFlags.begin(), kFlags.end());
    for (const char* word :
         {"--thread", "--time_based", "--group_reporting", "--overwrite=1", "--allow_file_create=0",
          "--eta=never", "--disk_util=0", "--output-format=json"})
        words.emplace_back(word);
    words.push_back(fmt::format("--direct={:d}", job.direct));
    words.push_back(fmt::format("--bs={}", job.block_bytes));
    words.push_back(fmt::format("--iodepth={}", job.depth));
    words.push_back(fmt::format("--runtime={}ms", static_cast<int64_t>(job.seconds * 1000)));
    words.push_back(std::string("--rw=") + direction_of(job.access));
    for (int j = 0; j < job.jobs; ++j) {
        std::string names;
        for (size_t f = static_cast<size_t>(j); f < job.files.size();
             f += static_cast<size_t>(job.jobs)) {
            if (!names.empty()) names += ':';
            names += escaped(job.files[f]);
        }
        words.push_back(fmt::format("--name=job{}", j));
        words.push_back("--filename=" + names);
    }
    return words;
}

[[noreturn]] void fio_failed(const std::string& said) {
    throw Error(Trouble::io, {.what = "fio failed",
                              .where = "--compare-fio",
                              .measured = shown(said, 500),
                              .remedy = "run it by hand, or leave --compare-fio out"});
}

nlohmann::json report_of(const std::string& text) {
    const size_t begin = text.rfind("{\n", text.find("\"fio version\""));
    if (begin == std::string::npos) fio_failed(text);
    return parse_json(text.substr(begin), {.where = "--compare-fio",
                                           .what = "fio's report is not JSON",
                                           .remedy = "leave --compare-fio out",
                                           .trouble = Trouble::io});
}

Sample sample_of(const nlohmann::json& report, const Child& child) {
    const nlohmann::json& all = report.at("jobs").at(0);
    double milliseconds = 0;
    Sample sample;
    for (const char* direction : {"read", "write"}) {
        const nlohmann::json& one = all.at(direction);
        const bool read = direction[0] == 'r';
        (read ? sample.bytes_read : sample.bytes_written) = one.at("io_bytes").get<int64_t>();
        sample.operations += one.at("total_ios").get<int64_t>();
        milliseconds = std::max(milliseconds, one.at("runtime").get<double>());
    }
    sample.seconds = milliseconds * 1e-3;
    if (sample.operations == 0) fio_failed("it counted no operation");
    // fio prints its report when its jobs have ended; what lies around them stays outside.
    const double end = report.at("timestamp_ms").get<double>() * 1e-3;
    constexpr double kMargin = 0.15;
    sample.cpu_seconds = sample.seconds * child.cpu_rate(end - (1 - kMargin) * sample.seconds,
                                                         end - kMargin * sample.seconds);
    return sample;
}

}  // namespace

std::string fio_flags() {
    std::string flags;
    for (const std::string& flag : kFlags) flags += flag.substr(2) + ' ';
    return flags + "huge pages";
}

std::string fio_version() {
    Child child({"fio", "--version"});
    const int status = child.wait();
    if (interrupted()) return {};
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        throw Error(Trouble::usage, {.what = "fio cannot be run",
                                     .where = "--compare-fio",
                                     .measured = child.text(),
                                     .remedy = "install the package fio (apt-get install fio)"});
    return child.text().substr(0, child.text().find('\n'));
}

Sample run_fio(const FioJob& job) try {
    Child child(words_of(job));
    const int status = child.wait();
    if (interrupted()) return {};
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) fio_failed(child.text());
    return sample_of(report_of(child.text()), child);
} catch (const nlohmann::json::exception& error) {
    fio_failed(std::string("its report lacks something: ") + error.what());
}

}  // namespace ferry::tools
