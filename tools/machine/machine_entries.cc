#include "machine_entries.h"

#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/files.h"
#include "base/json_reader.h"
#include "base/words.h"

namespace ferry::tools {

using cost::Measurements;
using nlohmann::json;

namespace {

const std::array<std::string, 5> kLists = {"paths", "memory", "devices", "kernels", "ranks"};

constexpr const char* kOtherFile =
    "give another file, or write it with `ferry bench --all --save FILE`";

// What a key stands for that an entry lacks: memory's numbers are a host's, ranks share nothing.
json by_default(const std::string& key) {
    if (key == kOf) return kOfHost;
    if (key == kRanksAtOnce) return 1;
    return key == kTensor || key == kSequence || key == kPerHost ? json(1) : json();
}

// No machine's numbers come near these ends: what is beyond them, or between the lower one and 0,
// makes infinities and zeros of times.
constexpr double kLeastNumber = 1e-15, kMostNumber = 1e18;

}  // namespace

const char* key_of(model::Saved what) {
    constexpr model::OfSaved<const char*> kKeys{"attention_seconds", "mlp_seconds",
                                                "projection_seconds"};
    return kKeys[model::at(what)];
}

void refuse_file(const std::string& file, std::string what, std::string measured,
                 std::string remedy) {
    throw Error(Trouble::usage, {.what = std::move(what),
                                 .where = file,
                                 .measured = std::move(measured),
                                 .remedy = remedy.empty() ? kOtherFile : std::move(remedy)});
}

json read_entries(const std::string& file, bool may_be_new) {
    std::error_code ignored;
    if (may_be_new && !std::filesystem::exists(file, ignored))
        return json{{"ferry_machine", kMachineFormat}};
    const std::string text =
        read_text_file(file, {.name = "the machine file", .remedy = kOtherFile});
    json content = parse_json(text, {.where = file,
                                     .what = "the file exists and is no machine file of ferry's",
                                     .remedy = kOtherFile,
                                     .comments = true});
    const json format = content.is_object() ? content.value("ferry_machine", json()) : json();
    if (!format.is_number_unsigned() || format.get<uint64_t>() == 0)
        refuse_file(file, "the file exists and is no machine file of ferry's");
    if (format.get<uint64_t>() > kMachineFormat)
        refuse_file(file, "the machine file was written by a newer ferry", shown_json(format));
    for (const std::string& list : kLists) {
        if (content.contains(list) && !content[list].is_array())
            refuse_file(file, fmt::format("the machine file's \"{}\" is no list", list));
    }
    // Other keys are the user's own notes, but for those that look like one of these.
    for (const auto& item : content.items()) {
        const std::string near = nearest_word(item.key(), kLists);
        if (item.key() == "ferry_machine" || near.empty() || near == item.key()) continue;
        refuse_file(file, "the machine file has a key that ferry does not know",
                    "\"" + shown(item.key(), 100) + "\"",
                    "call it \"" + near + "\", or give it a name unlike that");
    }
    return content;
}

int64_t drive_of(const std::string& path) {
    struct stat status {};
    return stat(path.c_str(), &status) == 0 ? static_cast<int64_t>(status.st_dev) : -1;
}

bool is_about(const json& one, const json& key) {
    return one.is_object() && std::ranges::all_of(key.items(), [&](const auto& item) {
               return one.value(item.key(), by_default(item.key())) == item.value();
           });
}
const json* entry(const json& content, const char* list, const json& key) {
    if (!content.contains(list)) return nullptr;
    const json& all = content[list];
    const auto found =
        std::ranges::find_if(all, [&](const json& one) { return is_about(one, key); });
    return found == all.end() ? nullptr : &*found;
}

json key_of_memory(int threads, const char* of, int at_once) {
    return {{"threads", threads}, {kOf, of}, {kRanksAtOnce, at_once}};
}

json key_of_device(const std::string& device, int at_once) {
    return {{"device", device}, {kRanksAtOnce, at_once}};
}

json key_of_kernels(const MeasurementsOf& what) {
    const cost::KernelsOf& of = what.kernels;
    return {{"model", of.model},         {"compute", of.compute}, {"device", of.device},
            {"libraries", of.libraries}, {"threads", of.threads}, {"under_load", of.under_load},
            {kRanksAtOnce, what.at_once}};
}

json key_of_ranks(const MeasurementsOf& what) {
    return {{"ranks", what.count.ranks},
            {"on_a_host", what.count.on_a_host},
            {"by", what.by},
            {kTensor, what.groups.tensor},
            {kSequence, what.groups.sequence},
            {kPerHost, what.ranks_per_host}};
}
json key_of_ungrouped(MeasurementsOf what) {
    what.groups = {};
    what.ranks_per_host = 1;
    return key_of_ranks(what);
}

std::span<const OfGroup> groups_of_ranks() {
    static const std::array kGroups{OfGroup{kTensor, &Measurements::with_slices},
                                    OfGroup{kSequence, &Measurements::with_sequence},
                                    OfGroup{"in_host", &Measurements::in_host},
                                    OfGroup{"across_hosts", &Measurements::across_hosts},
                                    OfGroup{"between_stages", &Measurements::between_stages}};
    return kGroups;
}

double positive(const std::string& file, const json& of, const std::string& where,
                const char* key) {
    if (!of.contains(key))
        refuse_file(file, fmt::format("{}: the number \"{}\" is missing", where, key));
    const json& value = of[key];
    if (!value.is_number() || !(value.get<double>() > 0))
        refuse_file(file, fmt::format("{}: \"{}\" must be a number above 0", where, key),
                    shown_json(value));
    if (value.get<double>() < kLeastNumber || value.get<double>() > kMostNumber)
        refuse_file(
            file,
            fmt::format("{}: \"{}\" must be of {} to {}", where, key, kLeastNumber, kMostNumber),
            shown_json(value));
    return value.get<double>();
}

// A number that older files lack.
double none_or_more(const std::string& file, const json& of, const std::string& where,
                    const char* key) {
    const json value = of.value(key, json(0.0));
    if (!value.is_number() || value.get<double>() < 0 || value.get<double>() > kMostNumber)
        refuse_file(file,
                    fmt::format("{}: \"{}\" must be a number of 0 to {}", where, key, kMostNumber),
                    shown_json(value));
    return value.get<double>();
}

int64_t count_in(const std::string& file, const json& value, const std::string& where,
                 const char* key, uint64_t most) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > most)
        refuse_file(file,
                    fmt::format("{}: \"{}\" must be a whole number of 0 to {}", where, key, most),
                    shown_json(value));
    return value.get<int64_t>();
}

// A count that older files lack.
int64_t count_or_zero(const std::string& file, const json& of, const std::string& where,
                      const char* key, uint64_t most) {
    if (!of.is_object() || !of.contains(key)) return 0;
    return count_in(file, of[key], where, key, most);
}

}  // namespace ferry::tools
