// OpenBLAS chooses its kernels by the processor's model number while it is loaded; a processor
// newer than the library gets the oldest ones. So it is loaded by hand, and a second time where the
// first choice is a poor one.
#include "blas.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/log.h"
#include "base/process_limits.h"
#include "base/text.h"
#include "better_blas.h"
#include "ferry/error.h"
#include "ops/blas_kernels.h"
#include "ops/ops.h"

namespace ferry::ops {

#ifdef __x86_64__
namespace {

// Which later processors of the same maker lack.
bool has_3dnow() {
    constexpr unsigned kExtended = 0x80000001, kBit = 1U << 31;
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(kExtended, &a, &b, &c, &d) != 0 && (d & kBit) != 0;
}

}  // namespace
#endif

// By what their instructions need, the widest first. Those written for one maker's processors need
// that maker's instructions.
std::vector<BlasCore> blas_cores() {
#ifdef __x86_64__
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    const bool avx = __builtin_cpu_supports("avx") != 0;
    const bool fma4 = avx && __builtin_cpu_supports("fma4");
    const bool sse4_1 = __builtin_cpu_supports("sse4.1") != 0;
    const bool ssse3 = __builtin_cpu_supports("ssse3") != 0;
    const bool sse3 = __builtin_cpu_supports("sse3") != 0;
    const bool sse4a = __builtin_cpu_supports("sse4a") != 0;
    return {{"Sapphirerapids", bf16},
            {"Cooperlake", bf16},
            {"SkylakeX", avx512},
            {"Haswell", avx2},
            {"Zen", avx2},
            {"Excavator", fma4 && avx2},
            {"Steamroller", fma4},
            {"Piledriver", fma4},
            {"Bulldozer", fma4},
            {"Sandybridge", avx},
            {"Nehalem", __builtin_cpu_supports("sse4.2") != 0},
            {"Dunnington", sse4_1},
            {"Penryn", sse4_1},
            {"Core2", ssse3},
            {"Atom", ssse3},
            {"Nano", ssse3},
            {"Barcelona", sse4a},
            {"Bobcat", sse4a},
            {"Opteron_SSE3", has_3dnow() && sse3},
            {"Opteron", has_3dnow()},
            {"Prescott", sse3}};
#else
    return {};
#endif
}

namespace {

constexpr const char* kChoice = "OPENBLAS_CORETYPE";
constexpr const char* kThreads = "OPENBLAS_NUM_THREADS";

bool runs_here(std::string_view core) {
    return std::ranges::any_of(
        blas_cores(), [&](const BlasCore& known) { return known.name == core && known.runs; });
}

// Empty: `chosen` is as good as any.
std::string better_than([[maybe_unused]] std::string_view chosen) {
    constexpr std::array<std::string_view, 3> kWide = {"SkylakeX", "Cooperlake", "Sapphirerapids"};
    constexpr std::array<std::string_view, 2> kAvx2 = {"Haswell", "Zen"};
    const auto among = [chosen](const auto& cores) {
        return std::ranges::find(cores, chosen) != cores.end();
    };
    if (runs_here("SkylakeX")) return among(kWide) ? "" : "SkylakeX";
    if (runs_here("Haswell")) return among(kAvx2) || among(kWide) ? "" : "Haswell";
    return {};
}

// The process's environment with other values of some variables, while it lives. setenv() would
// change the array under a thread that reads it: this puts another array in its place, which
// stays readable for ever, and so does the old one.
class OtherEnvironment {
public:
    explicit OtherEnvironment(std::vector<std::string> values) : before_(environ) {
        struct Kept {
            std::vector<std::string> values;
            std::vector<char*> pointers;
        };
        auto* const kept = new Kept{std::move(values), {}};
        keep(kept);
        for (std::string& value : kept->values) kept->pointers.push_back(value.data());
        for (char** at = before_; at != nullptr && *at != nullptr; ++at) {
            const std::string_view old = *at;
            const auto same = [&](const std::string& value) {
                return old.starts_with(value.substr(0, value.find('=') + 1));
            };
            if (std::ranges::none_of(kept->values, same)) kept->pointers.push_back(*at);
        }
        kept->pointers.push_back(nullptr);
        during_ = kept->pointers.data();
        put(during_);
    }
    ~OtherEnvironment() {
        // Else another thread has set a variable meanwhile: what it made stands.
        if (environ == during_) put(before_);
    }
    OtherEnvironment(const OtherEnvironment&) = delete;
    OtherEnvironment& operator=(const OtherEnvironment&) = delete;

private:
    static void put(char** array) { std::atomic_ref(environ).store(array); }
    // Reachable to the process's last instruction, so that no leak is reported: the list itself is
    // never destroyed.
    static void keep(void* memory) {
        static auto& kept = *new std::vector<void*>;
        kept.push_back(memory);
    }

    char** const before_;
    char** during_ = nullptr;
};

[[noreturn]] void refuse_library(const std::string& what, const std::string& measured) {
    const std::string files = reached_file_limit();
    const std::string limit = files.empty() ? address_space_limit() : files;
    const std::string install = "install libopenblas0-pthread";
    throw Error(limit.empty() ? Trouble::usage : Trouble::does_not_fit,
                {.what = what,
                 .where = FERRY_OPENBLAS,
                 .measured = measured,
                 .limit = limit,
                 .remedy = !files.empty()   ? "raise that limit"
                           : !limit.empty() ? "raise that limit, or " + install
                                            : install});
}

template <class Function>
Function* symbol(void* library, const char* name) {
    return reinterpret_cast<Function*>(dlsym(library, name));
}

// In letters of either case, as OpenBLAS compares them.
bool is_same_core(std::string_view one, std::string_view other) {
    return std::ranges::equal(one, other, [](unsigned char a, unsigned char b) {
        return std::tolower(a) == std::tolower(b);
    });
}

// OpenBLAS takes whatever kernels are named, and the first product would end the process. For a
// name that it does not know it runs its oldest ones, without a word.
void require_runnable(const std::string& named) {
    const std::vector<BlasCore> cores = blas_cores();
    const auto core = std::ranges::find_if(
        cores, [&](const BlasCore& known) { return is_same_core(known.name, named); });
    if (cores.empty() || (core != cores.end() && core->runs)) return;
    std::string others;
    for (const BlasCore& other : cores)
        if (other.runs) others += (others.empty() ? "" : ", ") + other.name;
    const bool known = core != cores.end();
    throw Error(
        Trouble::usage,
        {.what = known ? "OpenBLAS is to run kernels that this processor has no instructions for"
                       : "OpenBLAS has no kernels of this name",
         .where = kChoice,
         .measured = known ? core->name : shown(named),
         .limit = others,
         .remedy = "unset it, or name one of those"});
}

// These change no number that ferry computes, and so cost no more than a line.
void warn_of_no_numbers() {
    for (const char* const name :
         {"OPENBLAS_VERBOSE", "OPENBLAS_BLOCK_FACTOR", "OPENBLAS_THREAD_TIMEOUT"}) {
        const char* const said = std::getenv(name);
        const std::string_view value = said != nullptr ? said : "";
        if (value.find_first_not_of("0123456789") == std::string_view::npos) continue;
        log_warn(std::string(name) + " is " + in_quotes(value) +
                 ": OpenBLAS takes whole numbers from 0 on there, and now its default");
    }
}

class Library {
public:
    // Throws where there is none. One that another part of the process has loaded is taken as it
    // is: others may be calling it.
    void load() {
        handle_ = dlopen(FERRY_OPENBLAS, RTLD_NOW | RTLD_NOLOAD);
        others_ = handle_ != nullptr;
        if (others_) {
            look();
            given_ = "another part of the program had loaded it";
            return;
        }
        const char* const set = std::getenv(kChoice);
        const std::string said = set != nullptr ? set : "";
        if (!said.empty()) require_runnable(said);
        warn_of_no_numbers();
        open({});
        if (!said.empty()) {
            given_ = std::string(kChoice) + " says so";
            if (!is_same_core(blas_.core, said))
                log_warn(std::string(kChoice) + " is " + said +
                         ", for which this OpenBLAS runs its " + blas_.core + " kernels");
            return;
        }
        if (const std::string core = better_than(blas_.core); !core.empty()) reload(core);
    }

    // With the kernels of this name, where nobody uses others.
    bool reload(const std::string& core) {
        if (others_ || users_ > 0) return false;
        const std::string before = blas_.core;
        dlclose(handle_);
        open(core);
        if (blas_.core == core) {
            given_.clear();
            return true;
        }
        dlclose(handle_);
        open(before);
        return false;
    }

    const Blas& blas() const { return blas_; }
    const std::string& given() const { return given_; }
    bool loaded() const { return handle_ != nullptr; }
    void use(int more) { users_ += more; }

private:
    // Empty: what the environment says, or the library chooses.
    void open(const std::string& core) {
        // Its own threads would stand idle, and where none can be started it ends the process.
        std::vector<std::string> variables{std::string(kThreads) + "=1"};
        if (!core.empty()) variables.push_back(std::string(kChoice) + "=" + core);
        const OtherEnvironment environment(std::move(variables));
        handle_ = dlopen(FERRY_OPENBLAS, RTLD_NOW | RTLD_LOCAL);
        if (handle_ == nullptr) {
            const char* const reason = dlerror();
            refuse_library("OpenBLAS cannot be loaded", reason ? reason : "");
        }
        look();
    }

    void look() {
        const auto config = symbol<char*()>(handle_, "openblas_get_config");
        const auto core = symbol<char*()>(handle_, "openblas_get_corename");
        const auto parallel = symbol<int()>(handle_, "openblas_get_parallel");
        const auto set_threads = symbol<void(int)>(handle_, "openblas_set_num_threads");
        blas_.sgemm = symbol<std::remove_pointer_t<Sgemm>>(handle_, "cblas_sgemm");
        if (!config || !core || !parallel || !set_threads || !blas_.sgemm)
            refuse_library("the library is not an OpenBLAS that ferry knows", "");
        // The serial build has no locks around its buffers (docs/decisions/0007-openblas.md).
        if (parallel() != 1)
            refuse_library("OpenBLAS is not the build with POSIX threads", config());
        set_threads(1);  // the team's threads call it, a tile each
        blas_.config = config();
        blas_.core = core();
        blas_.take_buffer = symbol<void*(int)>(handle_, "blas_memory_alloc");
        blas_.give_buffer = symbol<void(void*)>(handle_, "blas_memory_free");
        if (!blas_.give_buffer) blas_.take_buffer = nullptr;
    }

    void* handle_ = nullptr;
    Blas blas_{};
    int users_ = 0;
    bool others_ = false;
    std::string given_{};  // who else chose the kernels
};

std::mutex library_mutex;

Library& library() {
    static Library only;
    if (!only.loaded()) only.load();
    return only;
}

}  // namespace

const Blas& blas() {
    const std::lock_guard lock(library_mutex);
    return library().blas();
}

BlasUse::BlasUse() {
    const std::lock_guard lock(library_mutex);
    library().use(1);
    sgemm_ = library().blas().sgemm;
}

BlasUse::~BlasUse() {
    const std::lock_guard lock(library_mutex);
    library().use(-1);
}

std::string Blas::config_with(const std::string& other) const {
    std::string text = config;
    const size_t at = text.find(" " + core + " ");
    return at == std::string::npos ? text : text.replace(at + 1, core.size(), other);
}

std::string blas_core() { return blas().core; }

bool take_blas_core(const std::string& core) {
    const std::lock_guard lock(library_mutex);
    Library& mine = library();
    return mine.blas().core == core || (runs_here(core) && mine.reload(core));
}

std::string blas_chosen_by() {
    const std::lock_guard lock(library_mutex);
    return library().given();
}

std::string slow_blas() {
    const std::lock_guard lock(library_mutex);
    const Library& mine = library();
    const std::string better = better_than(mine.blas().core);
    if (better.empty() || mine.given().empty()) return {};
    return "OpenBLAS runs its " + mine.blas().core +
           " kernels, for an older processor than this one: " + mine.given() + "; with " + better +
           " a new run is two to five times as fast, and rounds differently";
}

std::string better_blas_core() {
    const std::lock_guard lock(library_mutex);
    return better_than(library().blas().core);
}

}  // namespace ferry::ops
