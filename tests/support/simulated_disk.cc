#include "simulated_disk.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

namespace ferry::aio {
namespace {

constexpr int64_t kSector = 512;

constexpr unsigned bit(Verb verb) { return 1u << static_cast<unsigned>(verb); }
constexpr unsigned kReads = bit(Verb::read), kWrites = bit(Verb::write),
                   kFlushes = bit(Verb::flush), kDiscards = bit(Verb::discard),
                   kData = kReads | kWrites, kAll = kData | kFlushes | kDiscards;

struct FaultKind {
    const char* name;
    double SimulatedDiskOptions::Odds::*odds;
    unsigned verbs;  // that it can happen to
};
using Odds = SimulatedDiskOptions::Odds;
constexpr FaultKind kKinds[kFaults] = {
    {"none", nullptr, 0},
    {"shorten", &Odds::shorten, kData},
    {"interrupt", &Odds::interrupt, kAll},
    {"again", &Odds::again, kAll},
    {"stall", &Odds::stall, kAll},
    {"unsupported", &Odds::unsupported, kDiscards},
    {"eio", &Odds::eio, kAll},
    {"failed_flush", &Odds::failed_flush, kFlushes},
    {"enospc", &Odds::enospc, kWrites | kFlushes},
    {"erofs", &Odds::erofs, kWrites},
    {"vanish", &Odds::vanish, kAll},
    {"bit_flip", &Odds::bit_flip, kData},
    {"lost_write", &Odds::lost_write, kWrites},
    {"misdirected_write", &Odds::misdirected_write, kWrites},
    {"torn_write", &Odds::torn_write, kWrites},
};

const FaultKind& kind_of(Fault fault) { return kKinds[static_cast<size_t>(fault)]; }

}  // namespace

const char* name_of(Fault fault) { return kind_of(fault).name; }
bool silent(Fault fault) { return fault >= Fault::bit_flip; }
bool loud_failure(Fault fault) { return fault >= Fault::eio && fault <= Fault::vanish; }

// ---------------------------------------------------------------- the backend

class SimulatedBackend final : public Backend {
public:
    SimulatedBackend(SimulatedDisk& disk, const BackendSetup& setup)
        : disk_(disk), path_(setup.path), depth_(static_cast<size_t>(setup.depth)) {
        disk_.backends_.push_back(this);
    }
    ~SimulatedBackend() override { std::erase(disk_.backends_, this); }

    std::string_view name() const noexcept override { return "sim"; }

    int submit(std::span<const Transfer> batch) override {
        size_t taken = std::min(batch.size(), depth_ - flying_.size());
        if (disk_.draw_unit() < disk_.options_.odds.partial_submission)
            taken = disk_.draw() % (taken + 1);
        for (const Transfer& transfer : batch.first(taken)) start(transfer);
        return static_cast<int>(taken);
    }

    int reap(std::span<Completion> out, Nanos until) override {
        size_t count = 0;
        while (count < out.size()) {
            const auto first = next();
            if (first == flying_.end() || first->due > std::max(until, now())) break;
            const int32_t result = disk_.perform(path_, first->transfer, first->fault);
            disk_.record(first->transfer, result);
            out[count++] = {first->transfer.id, result};
            flying_.erase(first);
        }
        return static_cast<int>(count);
    }

    void wake() noexcept override {}
    Nanos now() const noexcept override { return disk_.executor_.now(); }
    Nanos next_event() const noexcept override {
        const auto first = next();
        return first == flying_.end() ? kForever : first->due;
    }

private:
    friend class SimulatedDisk;
    struct Flying {
        Transfer transfer;
        Fault fault;
        Nanos due;
    };

    std::vector<Flying>::const_iterator next() const {
        return std::ranges::min_element(flying_, {}, [](const Flying& one) { return one.due; });
    }

    void start(const Transfer& transfer) {
        FERRY_CHECK(transfer.id < depth_);
        for (const Flying& other : flying_) check_disjoint(other.transfer, transfer);
        const Fault fault = disk_.draw_fault(path_, transfer.verb);
        const double seconds = static_cast<double>(transfer.size_bytes) / disk_.rate_of(path_);
        free_at_ = std::max(free_at_, now()) + static_cast<Nanos>(seconds * 1e9);
        Nanos due = free_at_ + static_cast<Nanos>(2 * disk_.draw_unit() *
                                                  static_cast<double>(disk_.options_.latency_ns));
        if (fault == Fault::stall) due += 1 + static_cast<Nanos>(disk_.draw_unit() * 5e9);
        flying_.push_back({transfer, fault, due});
    }

    // Two transfers to the same bytes at once: their order is anyone's guess.
    void check_disjoint(const Transfer& a, const Transfer& b) const {
        FERRY_CHECK(a.id != b.id, "a transfer is submitted twice");
        const bool data = a.verb <= Verb::write && b.verb <= Verb::write;
        if (a.file != b.file || !data || (a.verb == Verb::read && b.verb == Verb::read)) return;
        FERRY_CHECK(a.offset + a.size_bytes <= b.offset || b.offset + b.size_bytes <= a.offset,
                    "conflicting transfers are in flight together");
    }

    SimulatedDisk& disk_;
    const int path_;
    const size_t depth_;
    Nanos free_at_ = 0;
    std::vector<Flying> flying_;
};

// ---------------------------------------------------------------- the disk

SimulatedDisk::SimulatedDisk(SimulatedDiskOptions options, Executor& executor)
    : options_(std::move(options)),
      executor_(executor),
      state_(options_.seed * 0x9E3779B97F4A7C15u + 0x1234567) {}

BackendFactory SimulatedDisk::factory() {
    return [this](const BackendSetup& setup) {
        return std::make_unique<SimulatedBackend>(*this, setup);
    };
}

// Headers are no business of a backend: what they would say is told to the disk.
class SimulatedVolume final : public VolumeOnPaths {
public:
    SimulatedVolume(VolumeOptions options, Executor& executor, SimulatedDisk& disk)
        : VolumeOnPaths(std::move(options), executor, disk.factory()), disk_(disk) {
        disk_.lost_step_.reset();
    }
    void note_step(int64_t step) noexcept override { step_ = step; }
    int64_t noted_step() const noexcept override { return step_.value_or(-1); }
    void note_lost() noexcept override { disk_.lost_step_ = step_; }

private:
    SimulatedDisk& disk_;
    std::optional<int64_t> step_{};
};

std::unique_ptr<Volume> open_simulated_volume(VolumeOptions options, Executor& executor,
                                              SimulatedDisk& disk) {
    return std::make_unique<SimulatedVolume>(std::move(options), executor, disk);
}

// splitmix64
uint64_t SimulatedDisk::draw() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
double SimulatedDisk::draw_unit() { return static_cast<double>(draw() >> 11) * 0x1p-53; }

double SimulatedDisk::rate_of(int path) const {
    const auto p = static_cast<size_t>(path);
    return p < options_.path_bytes_per_s.size() ? options_.path_bytes_per_s[p]
                                                : options_.bytes_per_s;
}

bool SimulatedDisk::possible(Fault fault, Verb verb) const {
    return (kind_of(fault).verbs & bit(verb)) != 0;
}

Fault SimulatedDisk::draw_fault(int path, Verb verb) {
    ++transfers_;
    Fault chosen = Fault::none;
    double lot = draw_unit();
    for (int i = 1; i < kFaults && chosen == Fault::none; ++i) {
        const auto fault = static_cast<Fault>(i);
        const double odds = possible(fault, verb) ? options_.odds.*(kind_of(fault).odds) : 0;
        if (lot < odds) chosen = fault;
        lot -= odds;
    }
    if (possible(options_.fault, verb) && candidates_++ == options_.fault_at)
        chosen = options_.fault;
    if (chosen == Fault::vanish) vanished_.insert(path);
    ++injected_[static_cast<size_t>(chosen)];
    return chosen;
}

void SimulatedDisk::record(const Transfer& transfer, int64_t result) {
    for (const int64_t value :
         {executor_.now(), static_cast<int64_t>(transfer.verb), static_cast<int64_t>(transfer.file),
          transfer.offset, transfer.size_bytes, result})
        trace_ = (trace_ ^ static_cast<uint64_t>(value)) * 1099511628211u;
}

int32_t SimulatedDisk::perform(int path, const Transfer& transfer, Fault fault) {
    if (ended_++ == options_.stop_at) lose_power();
    if (!powered_) return -EIO;
    if (vanished_.contains(path)) return -ENODEV;
    File& file = at(path, transfer.file);
    if (loud_failure(fault) && transfer.verb == Verb::flush) keep_some(file);
    switch (fault) {
        case Fault::interrupt:
            return -EINTR;
        case Fault::again:
            return -EAGAIN;
        case Fault::eio:
        case Fault::failed_flush:
            return -EIO;
        case Fault::enospc:
            return -ENOSPC;
        case Fault::erofs:
            return -EROFS;
        case Fault::unsupported:
            return -EOPNOTSUPP;
        default:
            break;
    }
    if (transfer.verb == Verb::flush) {
        file.durable.resize(file.now.size());
        for (const File::Write& write : file.unflushed)
            std::ranges::copy(write.bytes, file.durable.begin() + write.offset);
        file.unflushed.clear();
        return 0;
    }
    const auto end = static_cast<size_t>(transfer.offset + transfer.size_bytes);
    if (file.now.size() < end) file.now.resize(end);
    if (transfer.verb == Verb::discard) {
        const std::vector<std::byte> zeros(static_cast<size_t>(transfer.size_bytes));
        store(file, transfer.offset, zeros.data(), transfer.size_bytes);
        return 0;
    }
    if (transfer.verb == Verb::write) return perform_write(file, transfer, fault);
    int64_t bytes = transfer.size_bytes;
    if (fault == Fault::shorten)
        bytes = static_cast<int64_t>(draw() % static_cast<uint64_t>(bytes));
    memcpy(transfer.data, file.now.data() + transfer.offset, static_cast<size_t>(bytes));
    if (fault == Fault::bit_flip)
        transfer.data[draw() % static_cast<uint64_t>(bytes)] ^=
            static_cast<std::byte>(1 << draw() % 8);
    return static_cast<int32_t>(bytes);
}

int32_t SimulatedDisk::perform_write(File& file, const Transfer& transfer, Fault fault) {
    const int64_t size = transfer.size_bytes;
    const auto some = [&](int64_t below) {
        return static_cast<int64_t>(draw() % static_cast<uint64_t>(below));
    };
    switch (fault) {
        case Fault::shorten: {
            const int64_t bytes = some(size);
            store(file, transfer.offset, transfer.data, bytes);
            return static_cast<int32_t>(bytes);
        }
        case Fault::lost_write:
            break;
        case Fault::torn_write:
            store(file, transfer.offset, transfer.data, some(ceil_div(size, kSector)) * kSector);
            break;
        case Fault::misdirected_write: {
            // Somewhere else in what this file holds so far, whole blocks away.
            const auto blocks = static_cast<int64_t>(file.now.size()) / 4096;
            const int64_t astray =
                (transfer.offset / 4096 + 1 + some(std::max<int64_t>(1, blocks - 1))) % blocks *
                4096;
            const int64_t room = static_cast<int64_t>(file.now.size()) - astray;
            if (astray != transfer.offset) store(file, astray, transfer.data, std::min(size, room));
            break;
        }
        case Fault::bit_flip: {
            store(file, transfer.offset, transfer.data, size);
            file.now[static_cast<size_t>(transfer.offset + some(size))] ^=
                static_cast<std::byte>(1 << draw() % 8);
            break;
        }
        default:
            store(file, transfer.offset, transfer.data, size);
    }
    return static_cast<int32_t>(size);
}

void SimulatedDisk::store(File& file, int64_t offset, const std::byte* data, int64_t bytes) {
    std::copy_n(data, bytes, file.now.begin() + offset);
    if (options_.power_loss) file.unflushed.push_back({offset, {data, data + bytes}});
}

// A write under way is one that may have happened: sector by sector, like the unflushed ones, where
// power fails; whole or not at all where only the process ends.
void SimulatedDisk::end_flights() {
    for (SimulatedBackend* backend : backends_) {
        for (const auto& one : backend->flying_) {
            const Transfer& transfer = one.transfer;
            if (transfer.verb != Verb::write) continue;
            if (!options_.power_loss && draw() % 2) continue;
            File& file = at(backend->path_, transfer.file);
            const auto end = static_cast<size_t>(transfer.offset + transfer.size_bytes);
            if (file.now.size() < end) file.now.resize(end);
            store(file, transfer.offset, transfer.data, transfer.size_bytes);
        }
    }
}

void SimulatedDisk::lose_power() {
    end_flights();
    powered_ = false;
    if (!options_.power_loss) return;
    for (auto& [place, file] : files_) {
        keep_some(file);
        file.now = file.durable;
    }
}

int64_t SimulatedDisk::injected_of(bool (*kind)(Fault)) const {
    int64_t count = 0;
    for (int i = 1; i < kFaults; ++i)
        if (const auto fault = static_cast<Fault>(i); kind(fault)) count += injected(fault);
    return count;
}

void SimulatedDisk::heal() {
    power_up();
    vanished_.clear();
    options_.odds = {};
    options_.fault = Fault::none;
    options_.stop_at = -1;
}

void SimulatedDisk::trouble(const SimulatedDiskOptions::Odds& odds, int64_t stop_at) {
    options_.odds = odds;
    options_.stop_at = stop_at < 0 ? -1 : ended_ + stop_at;
}

void SimulatedDisk::rot() {
    std::vector<File*> files;
    for (auto& [place, file] : files_)
        if (!file.now.empty()) files.push_back(&file);
    if (files.empty()) return;
    File& file = *files[draw() % files.size()];
    const size_t at = draw() % file.now.size();
    const auto turned = static_cast<std::byte>(1 << draw() % 8);
    file.now[at] ^= turned;
    if (at < file.durable.size()) file.durable[at] ^= turned;
    for (File::Write& write : file.unflushed) {
        const auto first = static_cast<size_t>(write.offset);
        if (at >= first && at - first < write.bytes.size()) write.bytes[at - first] ^= turned;
    }
}

// Any sectors that were not flushed become durable; the others are lost.
void SimulatedDisk::keep_some(File& file) {
    file.durable.resize(file.now.size());
    for (const File::Write& write : file.unflushed) {
        for (size_t at = 0; at < write.bytes.size(); at += kSector) {
            if (draw() % 2) continue;
            const size_t size = std::min<size_t>(kSector, write.bytes.size() - at);
            std::copy_n(write.bytes.begin() + static_cast<std::ptrdiff_t>(at), size,
                        file.durable.begin() + write.offset + static_cast<std::ptrdiff_t>(at));
        }
    }
    file.unflushed.clear();
}

}  // namespace ferry::aio
