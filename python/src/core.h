// Helpers that the parts of the extension share. The extension stands on the C ABI
// (include/ferry/ferry.h) alone.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ferry/ferry.h"

namespace ferry::python {

namespace nb = nanobind;
using namespace nb::literals;

template <class T>
T sized() {
    T made;
    FERRY_INIT(made);
    return made;
}

// ---------------------------------------------------------------- errors

// Raises the exception of ferry_offload.errors that belongs to the status.
[[noreturn]] void raise(ferry_status status, const std::string& text);
// USAGE, in the words of the C ABI's errors.
[[noreturn]] void refuse(const std::string& what, const std::string& measured,
                         const std::string& limit);
// The GIL is others' while it lives. At the end of the interpreter, which ends threads that come
// back for it in the midst of their C++, they stay here instead.
class OthersRun {
public:
    OthersRun() : state_(PyEval_SaveThread()) {}
    ~OthersRun() { come_back(state_); }
    OthersRun(const OthersRun&) = delete;
    OthersRun& operator=(const OthersRun&) = delete;

private:
    static void come_back(PyThreadState* state) noexcept;
    PyThreadState* const state_;
};
// A callback's stay in Python, on whichever thread. False: the interpreter has ended, and there is
// nobody to be told. Its end waits for those that are there.
class InPython {
public:
    InPython() noexcept;
    ~InPython();
    InPython(const InPython&) = delete;
    InPython& operator=(const InPython&) = delete;
    explicit operator bool() const { return gil_.has_value(); }

private:
    std::optional<nb::gil_scoped_acquire> gil_;
};
// Runs call() without the GIL; raises what it fails with. True: FERRY_OK, false: FERRY_AGAIN.
template <class Call>
bool done(const Call& call) {
    ferry_status status = FERRY_OK;
    std::string text;
    {
        const OthersRun others_run;
        status = call();
        if (status != FERRY_OK && status != FERRY_AGAIN) text = ferry_last_error();
    }
    if (status != FERRY_OK && status != FERRY_AGAIN) raise(status, text);
    return status == FERRY_OK;
}

// ---------------------------------------------------------------- handles

// An object to close before the interpreter ends: buffers of transfers are Python's memory.
class Closable {
public:
    Closable();
    virtual ~Closable();
    Closable(const Closable&) = delete;
    Closable& operator=(const Closable&) = delete;
    // Not where memory of it is in use. Other threads run meanwhile, and may end this object.
    virtual void close_at_exit() noexcept = 0;
};
// For the end of the interpreter: other threads' calls do not come back from then on.
void close_all() noexcept;

// A handle of the C ABI. Whatever uses its memory shares it. It ends with the GIL held.
template <class T, ferry_status (*kClose)(T*)>
class Handle : public Closable, public std::enable_shared_from_this<Handle<T, kClose>> {
public:
    ~Handle() override { close_quietly(); }
    void close_quietly() noexcept {
        if (T* const mine = std::exchange(ticket, nullptr)) kClose(mine);
    }
    void close_at_exit() noexcept override {
        if (this->weak_from_this().use_count() <= 1) close_while_others_run();
    }
    // A call of another thread's that it waits for may want the GIL, for a callback.
    void close_while_others_run() noexcept {
        T* const mine = std::exchange(ticket, nullptr);
        if (!mine) return;
        const OthersRun others_run;
        kClose(mine);
    }
    T* ticket = nullptr;
};
// Closes what a Python object holds. Refused while arrays use its memory. The handle stays, without
// a ticket: other threads may be about to call with it.
template <class T>
void close_unused(const std::shared_ptr<T>& handle) {
    if (const long users = handle.use_count() - 1; users > 0)
        refuse("arrays or leases use this memory", std::to_string(users),
               "none: delete them before close()");
    handle->close_while_others_run();
}

// ---------------------------------------------------------------- arguments

// An index of `words`, or a ValueError that names them.
int32_t choice(const char* name, const std::string& word, const std::vector<std::string>& words);
// 4096, "4GiB".
int64_t bytes_of(nb::handle size);
// A str, bytes or os.PathLike, as the system takes it. Refused where it is empty or holds a NUL
// byte, at which C would cut it and take another file.
std::string path_in(nb::handle given);
// Another text for C: refused for a NUL byte too.
const std::string& whole_text(const char* name, const std::string& text);

// Storage as a caller names it: a str, an os.PathLike or a ferry_offload.Path.
struct Path {
    std::string path{};
    int64_t size_bytes = 0;
    double bytes_per_s = 0, endurance_tbw = 0;
    bool raw_device = false;
};
struct Paths {
    explicit Paths(nb::handle given);
    std::vector<Path> texts{};
    std::vector<ferry_path> list{};
};

// An array of the caller's, by buffer protocol or DLPack, as the C ABI wants it: contiguous, on the
// CPU, of a type that it knows.
struct Array {
    void* data = nullptr;
    int64_t count = 0, bytes = 0;
    int32_t type = FERRY_F32;
    nb::ndarray<nb::ro> keep{};
};
enum class Use : uint8_t { reads, writes };
enum class Where : uint8_t { cpu, gpu };
// Bytes of any type.
Array bytes_in(const char* name, nb::handle given, Use use, Where where = Where::cpu);
// float32, float16 or bfloat16; uint16 counts as bfloat16's bits, for programs without that type.
// None: an empty one.
Array floats_in(const char* name, nb::handle given, Use use, Where where = Where::cpu);
// Moments may be codes too: uint8 is FERRY_INT8.
Array moments_in(const char* name, nb::handle given, Use use, Where where = Where::cpu);

// ---------------------------------------------------------------- memory that is ferry's

// Exported by the buffer protocol and DLPack; `owner` lives as long as anybody uses it. Without one
// there are no bytes (any more).
struct Memory {
    void* data = nullptr;
    int64_t bytes = 0;
    bool read_only = false;
    // Some users of the buffer protocol (torch.frombuffer) keep the exporter and no buffer of it.
    bool exported = false;
    std::shared_ptr<void> owner{};
    nb::object lease{};  // of what an array holds on to: it ends with its last array, if not before
};

// "Name(field=value, ...)" of all properties.
std::string shown(nb::handle object);

void bind_memory(nb::module_& module);
void bind_transfer(nb::module_& module);
void bind_aio(nb::module_& module);
void bind_files(nb::module_& module);
void bind_pool(nb::module_& module);
void bind_store(nb::module_& module);
void bind_optim(nb::module_& module);
void bind_engine(nb::module_& module);

}  // namespace ferry::python
