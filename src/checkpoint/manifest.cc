#include "checkpoint/manifest.h"

#include <spdlog/fmt/fmt.h>

#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/checksum.h"
#include "base/json_reader.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "stripe_sums.h"

namespace ferry::checkpoint {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// The text ends with its own checksum: of all that stands before the digits.
constexpr std::string_view kBeforeSum = "\"checksum\": \"", kBehindSum = "\"\n}\n";
constexpr size_t kDigits = 16;

std::string hex(uint64_t value) { return fmt::format("{:016x}", value); }
uint64_t checksum_of(std::string_view text) { return checksum(std::as_bytes(std::span(text))); }

// Null: no number, which JSON has no word for.
ordered_json number(double value) {
    return std::isfinite(value) ? ordered_json(value) : ordered_json();
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find('\n', at), text.size());
        lines.push_back(text.substr(at, end - at));
        at = end + 1;
    }
    return lines;
}

ordered_json to_json(const Shard& shard) {
    ordered_json arrays = ordered_json::array();
    for (const ArraySum& array : shard.arrays) {
        ordered_json one{
            {"name", array.name}, {"bytes", array.bytes}, {"checksum", hex(array.checksum)}};
        std::string stripes;
        for (const uint64_t stripe : array.stripes) stripes += hex(stripe);
        if (!stripes.empty()) one["stripes"] = std::move(stripes);
        arrays.push_back(std::move(one));
    }
    return {{"file", shard.file},
            {"bytes", shard.bytes},
            {"checksum", hex(shard.checksum)},
            {"arrays", std::move(arrays)}};
}

ordered_json to_json(const LastStep& last) {
    return {{"loss", number(last.loss)},
            {"gradient_norm", number(last.gradient_norm)},
            {"clip_factor", number(last.clip_factor)},
            {"lr", last.lr},
            {"loss_scale", last.loss_scale},
            {"seconds", last.seconds},
            {"targets", last.targets},
            {"tokens", last.tokens},
            {"skipped", last.skipped},
            {"speculative", last.speculative},
            {"committed", last.committed}};
}

// ---------------------------------------------------------------- reading

[[noreturn]] void damaged(const std::string& where, std::string measured, std::string limit) {
    throw Error(Trouble::io, {.what = "the checkpoint's manifest is damaged",
                              .where = where,
                              .measured = std::move(measured),
                              .limit = std::move(limit),
                              .remedy = "use another checkpoint: ferry ckpt ls lists them"});
}

// An object of the manifest, and how it is called.
class Fields {
public:
    Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
        if (!object.is_object()) damaged(where_, shown_json(object), "an object");
    }

    const json& at(const char* key) const {
        const auto found = object_.find(key);
        if (found == object_.end()) damaged(where_, "nothing", std::string(key));
        return *found;
    }
    Fields object(const char* key) const { return {at(key), where_ + ": " + key}; }
    const json& list(const char* key) const {
        const json& value = at(key);
        if (!value.is_array()) refuse(key, value, "a list");
        return value;
    }
    int64_t count(const char* key, int64_t without) const {
        return object_.contains(key) ? count(key) : without;
    }
    int64_t count(const char* key) const {
        constexpr uint64_t kMost = uint64_t{1} << 62;
        const json& value = at(key);
        if (!value.is_number_unsigned() || value.get<uint64_t>() > kMost)
            refuse(key, value, "a whole number up to 2^62");
        return value.get<int64_t>();
    }
    double number(const char* key) const {
        const json& value = at(key);
        if (value.is_null()) return std::numeric_limits<double>::quiet_NaN();
        if (!value.is_number()) refuse(key, value, "a number");
        return value.get<double>();
    }
    bool flag(const char* key) const {
        const json& value = at(key);
        if (!value.is_boolean()) refuse(key, value, "true or false");
        return value.get<bool>();
    }
    std::string text(const char* key) const {
        const json& value = at(key);
        if (!value.is_string()) refuse(key, value, "a text");
        return value.get<std::string>();
    }
    uint64_t sum(const char* key) const { return sums(key, 1).front(); }
    std::vector<uint64_t> sums(const char* key, int64_t count) const {
        const std::string digits = text(key);
        std::vector<uint64_t> values;
        for (size_t at = 0; at + kDigits <= digits.size(); at += kDigits) {
            const char* const end = digits.data() + at + kDigits;
            uint64_t value = 0;
            const auto read = std::from_chars(digits.data() + at, end, value, 16);
            if (read.ptr != end || read.ec != std::errc()) break;
            values.push_back(value);
        }
        if (std::ssize(values) != count || digits.size() != values.size() * kDigits)
            refuse(key, at(key), std::to_string(count * int64_t{kDigits}) + " hexadecimal digits");
        return values;
    }
    const std::string& where() const { return where_; }

private:
    [[noreturn]] void refuse(const char* key, const json& value, std::string limit) const {
        damaged(where_ + ": " + key, shown_json(value), std::move(limit));
    }

    const json& object_;
    std::string where_;
};

Shard read_shard(const json& value, bool in_stripes, const std::string& where) {
    const Fields fields(value, where);
    Shard shard{.file = fields.text("file"),
                .bytes = fields.count("bytes"),
                .checksum = fields.sum("checksum")};
    const bool no_file = shard.file.empty() || shard.file == "." || shard.file == "..";
    if (no_file || std::filesystem::path(shard.file).filename() != shard.file)
        damaged(where, in_quotes(shard.file), "the name of a file beside the manifest");
    int64_t left = shard.bytes;
    for (const json& one : fields.list("arrays")) {
        const Fields array(one, where + ": " + shard.file);
        shard.arrays.push_back(
            {array.text("name"), array.count("bytes"), array.sum("checksum"), {}});
        ArraySum& sum = shard.arrays.back();
        left -= sum.bytes;
        if (left < 0)
            damaged(array.where(), "arrays of more bytes than their file",
                    std::to_string(shard.bytes) + " bytes");
        if (!in_stripes || sum.bytes == 0) continue;
        sum.stripes = array.sums("stripes", ceil_div(sum.bytes, kStripeBytes));
        if (sum_of(sum.stripes) != sum.checksum)
            damaged(array.where(), hex(sum_of(sum.stripes)), hex(sum.checksum));
    }
    return shard;
}

LastStep read_last(const Fields& fields) {
    return {.loss = fields.number("loss"),
            .gradient_norm = fields.number("gradient_norm"),
            .clip_factor = fields.number("clip_factor"),
            .lr = fields.number("lr"),
            .loss_scale = fields.number("loss_scale"),
            .seconds = fields.number("seconds"),
            .targets = fields.count("targets"),
            .tokens = fields.count("tokens"),
            .skipped = fields.flag("skipped"),
            .speculative = fields.flag("speculative"),
            .committed = fields.flag("committed")};
}

void require_whole(std::string_view text, const std::string& where) {
    const size_t behind = kDigits + kBehindSum.size();
    const bool ends = text.size() > behind + kBeforeSum.size() && text.ends_with(kBehindSum) &&
                      text.substr(0, text.size() - behind).ends_with(kBeforeSum);
    if (!ends) damaged(where, std::to_string(text.size()) + " bytes", "a text with its checksum");
    const std::string_view body = text.substr(0, text.size() - behind);
    const std::string_view noted = text.substr(body.size(), kDigits);
    if (hex(checksum_of(body)) != noted)
        damaged(where, "checksum " + hex(checksum_of(body)), std::string(noted));
}

void require_known(const json& value, const std::string& where) {
    const bool has = value.is_object() && value.contains("version");
    if (!has || !value["version"].is_number_unsigned())
        damaged(where, "no version", "version " + std::to_string(kManifestVersion));
    const auto version = value["version"].get<uint64_t>();
    if (version >= kOldestManifestVersion && version <= kManifestVersion) return;
    throw Error(Trouble::usage,
                {.what = "the checkpoint is of a format that this ferry does not read",
                 .where = where,
                 .measured = "version " + std::to_string(version),
                 .limit = "version " + std::to_string(kManifestVersion),
                 .remedy = "use the ferry that wrote it: version " +
                           shown(value.value("ferry", json("unknown")).dump())});
}

}  // namespace

int64_t Manifest::bytes() const {
    int64_t all = 0;
    for (const Shard& shard : shards) all += shard.bytes;
    return all;
}

std::string write_manifest(const Manifest& m) {
    ordered_json shards = ordered_json::array();
    for (const Shard& shard : m.shards) shards.push_back(to_json(shard));
    ordered_json held_back;
    if (m.held_back) held_back = {{"step", m.held_back->step}, {"loss", number(m.held_back->loss)}};
    const ordered_json value{
        {"version", m.version},
        {"ferry", m.ferry},
        {"step", m.step},
        {"steps", m.steps},
        {"updates", m.updates},
        {"moment_updates", m.moment_updates},
        {"tokens", m.tokens},
        {"sequences", m.sequences},
        {"loss_scale",
         {{"value", m.loss_scale}, {"good", m.scale_good}, {"skipped", m.scale_skipped}}},
        {"skipped_in_a_row", m.skipped_in_a_row},
        {"unclipped_in_a_row", m.unclipped_in_a_row},
        {"held_back", held_back},
        {"last", to_json(m.last)},
        {"model", m.model},
        {"ranks", m.ranks},
        {"configuration_hash", hex(checksum_of(m.training))},
        {"training", lines_of(m.training)},
        {"numerics_hash", hex(m.numerics_hash)},
        {"numerics", m.numerics},
        {"shards", std::move(shards)},
        {"checksum", std::string(kDigits, '0')}};
    // A path may be no UTF-8: what stands for it is for people to read.
    std::string text = value.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
    const size_t digits = text.size() - kDigits - kBehindSum.size();
    return text.replace(digits, kDigits, hex(checksum_of(text.substr(0, digits))));
}

Manifest read_manifest(std::string_view text, const std::string& where) {
    constexpr size_t kMostValues = 4'000'000;
    const JsonSource source{.where = where,
                            .what = "the checkpoint's manifest is damaged: it is not JSON",
                            .remedy = "use another checkpoint: ferry ckpt ls lists them",
                            .trouble = Trouble::io,
                            .most_values = kMostValues};
    const json value = parse_json(text, source);
    require_whole(text, where);  // every version ends so: a wrong digit is no newer version
    require_known(value, where);
    const Fields fields(value, where);
    const Fields scale = fields.object("loss_scale");
    Manifest m{.version = fields.count("version"),
               .step = fields.count("step"),
               .steps = fields.count("steps"),
               .updates = fields.count("updates"),
               .moment_updates = fields.count("moment_updates", fields.count("updates")),
               .tokens = fields.count("tokens"),
               .sequences = fields.count("sequences"),
               .loss_scale = scale.number("value"),
               .scale_good = scale.count("good"),
               .scale_skipped = scale.count("skipped"),
               .skipped_in_a_row = fields.count("skipped_in_a_row"),
               .unclipped_in_a_row = fields.count("unclipped_in_a_row"),
               .last = read_last(fields.object("last")),
               .ferry = fields.text("ferry"),
               .model = fields.text("model"),
               .numerics = fields.text("numerics"),
               .numerics_hash = fields.sum("numerics_hash"),
               .ranks = static_cast<int>(fields.count("ranks"))};
    if (!fields.at("held_back").is_null()) {
        const Fields held_back = fields.object("held_back");
        m.held_back = {held_back.count("step"), held_back.number("loss")};
    }
    for (const json& line : fields.list("training")) {
        if (!line.is_string()) damaged(where + ": training", shown_json(line), "a line of text");
        m.training += line.get_ref<const std::string&>() + "\n";
    }
    for (const json& shard : fields.list("shards"))
        m.shards.push_back(read_shard(shard, m.version > 1, where));
    return m;
}

}  // namespace ferry::checkpoint
