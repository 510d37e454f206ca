// The log of a program that embeds ferry: nothing, until it asks.
#include "base/log.h"

#include <cstdio>
#include <mutex>
#include <string>

#include "callbacks.h"
#include "status.h"

namespace ferry::capi {
namespace {

struct Listener {
    ferry_log_callback callback = nullptr;
    void* context = nullptr;
    int32_t level = 0;
};
struct Log {
    std::mutex mutex{};  // held during the callback, too: one call at a time
    Listener listener{};
};
Log& log() {
    static Log* const kLog = new Log;  // threads may log until the very end of the process
    return *kLog;
}

void line(LogLevel level, Warning, std::string_view message) {
    Log& to = log();
    if (InCallback::of(&to)) return;  // of what the callback itself does
    const std::lock_guard lock(to.mutex);
    const auto number = static_cast<int32_t>(level);
    if (!to.listener.callback || number < to.listener.level) return;
    const InCallback within(&to);
    to.listener.callback(to.listener.context, number, std::string(message).c_str());
}

constexpr LogSink kSink{.line = line};

void listen(const Listener& listener) {
    check_choice("level", listener.level, FERRY_LOG_BUG);
    const std::lock_guard lock(log().mutex);
    log().listener = listener;
}

void print(void*, int32_t level, const char* text) {
    static constexpr const char* kNames[] = {"debug", "info", "warning", "bug"};
    std::fprintf(stderr, "ferry: %s: %s\n", kNames[level], text);
}

}  // namespace

void check_not_logging() {
    if (InCallback::of(&log()))
        refuse_busy("the callback for the log calls ferry", "call when it has returned");
}

bool listen_to_log() noexcept {
    set_log_sink(&kSink);
    return true;
}

}  // namespace ferry::capi

using namespace ferry::capi;

ferry_status ferry_log_to(ferry_log_callback callback, void* context, int32_t level) {
    return guarded(__func__, [&] { listen({callback, context, level}); });
}

ferry_status ferry_log_to_stderr(int32_t level) {
    return guarded(__func__, [&] { listen({print, nullptr, level}); });
}
