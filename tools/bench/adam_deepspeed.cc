#include "adam_deepspeed.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/json_reader.h"
#include "base/log.h"
#include "ferry/error.h"

namespace ferry::tools {
namespace {

// `Python script --theirs ...`: its standard output, line by line.
std::vector<std::string> lines_of(const std::string& command) {
    const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.c_str(), "r"), ::pclose);
    std::vector<std::string> lines;
    std::array<char, 4096> line{};
    while (pipe && std::fgets(line.data(), static_cast<int>(line.size()), pipe.get()))
        lines.emplace_back(line.data());
    return lines;
}

}  // namespace

std::vector<Row> compare_deepspeed(const AdamBench& what, const AdamRows& ours,
                                   const std::string& script) {
    if (!std::filesystem::exists(script)) {
        throw Error(Trouble::usage, {.what = "no such script to measure DeepSpeed with",
                                     .where = "--deepspeed " + script,
                                     .remedy = "name bench/adam_deepspeed.py of ferry's sources"});
    }
    const int64_t millions = std::max<int64_t>(1, what.count >> 20);
    std::ostringstream command;
    command << "python3 '" << script << "' --theirs --millions " << millions << " --threads";
    for (const int threads : what.threads) command << ' ' << threads;
    std::vector<Row> rows;
    std::string reason = "the script printed nothing";
    for (const std::string& line : lines_of(command.str())) {
        const auto found = parse_json_if_it_is(line, {.where = script}).value_or(nlohmann::json());
        if (!found.is_object()) continue;  // a line that some library printed
        reason = found.value("missing", "ferry's own row, in place from fp32, was not asked for");
        const auto mine = ours.in_place_fp32.find(found.value("threads", 0));
        if (mine == ours.in_place_fp32.end()) continue;
        Row row = ours.rows[mine->second];
        row.name.insert(0, "deepspeed: unscale + ");
        row.more.clear();
        row.reference = 0;
        for (const char* part : {"update", "unscale", "cast"})
            row.reference += found.value(part, 0.0);
        row.ratio = row.reference / row.value;
        row.ratios.clear();  // one figure of theirs
        rows.push_back(row);
    }
    if (rows.empty()) log_warn("no row of DeepSpeed's: " + reason);
    return rows;
}

}  // namespace ferry::tools
