#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "trace/trace.h"

namespace ferry::trace {
namespace {

// Strings of a trace are ferry's own words; a path in a row's name may hold anything.
std::string quoted(std::string_view text) {
    return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Text on its way to a file, a block at a time.
class Text {
public:
    explicit Text(Draft& file) : file_(file) {}
    template <class... Arguments>
    void add(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
        fmt::format_to(std::back_inserter(text_), format, std::forward<Arguments>(arguments)...);
        if (std::ssize(text_) >= kMiB) end();
    }
    void end() {
        file_.write(text_);
        text_.clear();
    }

private:
    Draft& file_;
    std::string text_{};
};

void write_name(Text& out, const char* what, size_t process, size_t thread, std::string_view name) {
    out.add("{{\"ph\":\"M\",\"name\":\"{}\",\"pid\":{},\"tid\":{},\"args\":{{\"name\":{}}}}},\n",
            what, process, thread, quoted(name));
}

// Times in microseconds, as the format wants them.
void write_slice(Text& out, const Slice& slice, size_t process, Nanos origin_ns) {
    out.add(R"({{"ph":"X","name":{},"pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},"args":{{)",
            quoted(slice.name), process, slice.row,
            static_cast<double>(slice.begin_ns - origin_ns) * 1e-3,
            static_cast<double>(slice.end_ns - slice.begin_ns) * 1e-3);
    const char* separator = "";
    const auto argument = [&](const char* name, int64_t value, bool said) {
        if (!said) return;
        out.add("{}\"{}\":{}", separator, name, value);
        separator = ",";
    };
    argument("step", slice.step, slice.step >= 0);
    argument("layer", slice.layer, slice.layer >= 0);
    argument("item", slice.item, slice.item >= 0);
    argument("bytes", slice.bytes, slice.bytes > 0);
    out.add("}}}},\n");
}

}  // namespace

Recording::Recording(size_t slices_max) : slices_(slices_max) {}

RowId Recording::add_row(std::string group, std::string name) {
    rows_.push_back({std::move(group), std::move(name)});
    return static_cast<RowId>(rows_.size() - 1);
}

void Recording::add(const Slice& slice) noexcept {
    if (paused_.load(std::memory_order_relaxed)) return;
    const size_t at = next_.fetch_add(1, std::memory_order_relaxed);
    if (at < slices_.size()) slices_[at] = slice;
}

size_t Recording::size() const noexcept { return std::min(next_.load(), slices_.size()); }
size_t Recording::dropped() const noexcept { return next_.load() - size(); }

void Recording::write(const std::string& path) const {
    std::map<std::string, size_t> processes;
    for (const Row& row : rows_) processes.try_emplace(row.group, processes.size() + 1);
    Nanos origin_ns = size() > 0 ? slices_[0].begin_ns : 0;
    for (size_t i = 0; i < size(); ++i) origin_ns = std::min(origin_ns, slices_[i].begin_ns);

    // An older trace; nothing else that came there since the run began.
    Draft file(path, "the trace cannot be written", {}, {.beginning = "{\"displayTimeUnit\""});
    Text out(file);
    out.add("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    for (const auto& [group, process] : processes) {
        write_name(out, "process_name", process, 0, group);
    }
    for (size_t row = 0; row < rows_.size(); ++row) {
        write_name(out, "thread_name", processes.at(rows_[row].group), row, rows_[row].name);
    }
    for (size_t i = 0; i < size(); ++i) {
        write_slice(out, slices_[i], processes.at(rows_[slices_[i].row].group), origin_ns);
    }
    // Of several ranks on a host: what lay how far before.
    out.add("{{\"ph\":\"M\",\"name\":\"clock\",\"pid\":0,\"args\":{{\"origin_ns\":{}}}}},\n",
            origin_ns);
    // The list ends without a comma after its last event.
    out.add("{{\"ph\":\"M\",\"name\":\"slices_dropped\",\"pid\":0,\"args\":{{\"count\":{}}}}}]}}\n",
            dropped());
    out.end();
    file.publish();
}

}  // namespace ferry::trace
