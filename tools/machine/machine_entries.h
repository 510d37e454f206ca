// The entries of a machine file as JSON: their keys, how one is found among others, and numbers
// that are checked when they are read. Its readers and its writer share them.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "cost/measurements.h"
#include "measurements_of.h"

namespace ferry::tools {

constexpr int kMachineFormat = 1;

inline constexpr const char *kOf = "of", *kOfHost = "host", *kOfRank = "rank";
// Of a path: a chunk goes through one ring.
inline constexpr const char* kAtOnce = "chunks_at_once";
// Of kernels, memory and processors: ranks of the host that were measured at the same time.
inline constexpr const char* kRanksAtOnce = "ranks_at_once";
// Ranks in each group of `ranks`, and the rates within these groups.
inline constexpr const char *kTensor = "tensor", *kSequence = "sequence",
                            *kPerHost = "ranks_per_host";
inline constexpr const char* kCopyWithin = "copy_within_bytes_per_s";  // may be missing
inline constexpr const char* kMomentum = "momentum_bytes_per_s";       // the same
const char* key_of(model::Saved what);

// Throws usage with these words.
[[noreturn]] void refuse_file(const std::string& file, std::string what, std::string measured = {},
                              std::string remedy = {});
// Throws usage for a file that is no machine file of a format that is understood. `may_be_new`: one
// that is not there is empty.
nlohmann::json read_entries(const std::string& file, bool may_be_new);

// The number of the file system that a path lies on: paths of the same one share a drive. -1: it
// is not here.
int64_t drive_of(const std::string& path);

// Whether an entry of a list is about this.
bool is_about(const nlohmann::json& one, const nlohmann::json& key);
// Null: the list has none.
const nlohmann::json* entry(const nlohmann::json& content, const char* list,
                            const nlohmann::json& key);

// The numbers of an entry, by key.
struct Field {
    const char* key;
    double cost::Measurements::*value;
};
inline constexpr std::array kMemory{
    Field{"update_bytes_per_s", &cost::Measurements::dram_bytes_per_s},
    Field{"check_bytes_per_s", &cost::Measurements::check_bytes_per_s},
    Field{"update_overhead_s", &cost::Measurements::update_overhead_s},
    Field{"out_of_place", &cost::Measurements::out_of_place}};
inline constexpr std::array kDevice{
    Field{"copy_bytes_per_s", &cost::Measurements::copy_bytes_per_s},
    Field{"update_bytes_per_s", &cost::Measurements::device_bytes_per_s}};
inline constexpr std::array kRanks{Field{"bytes_per_s", &cost::Measurements::comm_bytes_per_s},
                                   Field{"overhead_s", &cost::Measurements::comm_overhead_s}};

nlohmann::json key_of_memory(int threads, const char* of, int at_once);
nlohmann::json key_of_device(const std::string& device, int at_once);
nlohmann::json key_of_kernels(const MeasurementsOf& what);
nlohmann::json key_of_ranks(const MeasurementsOf& what);
nlohmann::json key_of_ungrouped(MeasurementsOf what);  // the same ranks in no groups

// The rates within groups, by the words that their keys begin with.
struct OfGroup {
    std::string of;
    cost::GroupRate cost::Measurements::*rate;
    std::string bytes_per_s() const { return of + "_bytes_per_s"; }
    std::string overhead_s() const { return of + "_overhead_s"; }
};
std::span<const OfGroup> groups_of_ranks();

// The layers of a kernel's times, in the order of their numbers.
inline const std::vector<std::string> kLayers{"embedding", "block", "head"};

// Each throws usage, naming the file, where and the key.
double positive(const std::string& file, const nlohmann::json& of, const std::string& where,
                const char* key);
// A number that older files lack.
double none_or_more(const std::string& file, const nlohmann::json& of, const std::string& where,
                    const char* key);
int64_t count_in(const std::string& file, const nlohmann::json& value, const std::string& where,
                 const char* key, uint64_t most);
// A count that older files lack.
int64_t count_or_zero(const std::string& file, const nlohmann::json& of, const std::string& where,
                      const char* key, uint64_t most);

}  // namespace ferry::tools
