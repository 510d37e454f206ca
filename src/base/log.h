// The log: on standard error, or where the program that embeds ferry wants it.
#pragma once

#include <cstdint>
#include <string_view>

namespace ferry {

// Log lines go to standard error through spdlog; the level comes from FERRY_LOG (debug, info, warn,
// error; default info).
void log_debug(std::string_view message);
void log_info(std::string_view message);
void log_warn(std::string_view message);
// What a warning is about, where code asks for it; the words are for people.
enum class Warning : uint8_t { other, idle_with_one_stage };
// What every rank of a run would say alike: a thread of another than the first does not
// (base/of_rank.h).
void log_warn_of_run(std::string_view message, Warning about = Warning::other);

enum class LogLevel : uint8_t { debug, info, warn, bug };
// Called on any thread, for every line whatever its level. Must not call ferry or throw.
struct LogSink {
    void (*line)(LogLevel level, Warning about, std::string_view message) = nullptr;
};
// Lines go there instead, from now on; null: to standard error. `sink` lives until the process
// ends.
void set_log_sink(const LogSink* sink) noexcept;

}  // namespace ferry
