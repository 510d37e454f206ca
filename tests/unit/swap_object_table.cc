// Checksums of an object's pieces, on one thread and on several.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "object_table.h"
#include "tests/support/simulated_disk.h"

namespace ferry::swap {
namespace {

constexpr int64_t kBytes = 3 * aio::kPieceBytes + 4096;

class Checksums : public testing::TestWithParam<bool> {
protected:
    Objects objects() {
        Objects objects;
        objects.objects = {{.home = Tier::nvme, .bytes = kBytes, .slot_class = 0}};
        if (GetParam())
            objects.parallel = [this](int64_t count, const auto& body) {
                std::vector<std::jthread> threads;
                for (int64_t i = 0; i < count; ++i) threads.emplace_back(body, i);
                bodies_ += count;
            };
        return objects;
    }
    const std::unique_ptr<Executor> executor_ = make_simulated_executor(1);
    aio::SimulatedDisk disk_{{}, *executor_};
    const std::unique_ptr<aio::Volume> volume_ = aio::open_simulated_volume(
        {.paths = {{.path = "simulated"}}, .classes = {{"state", kBytes, 1}}, .write_once = false},
        *executor_, disk_);
    int64_t bodies_ = 0;
};

TEST_P(Checksums, TellTheFirstWrongPiece) {
    ObjectTable table(objects(), {}, volume_.get());
    std::vector<std::byte> bytes(kBytes, std::byte{7});
    table.seal(0, bytes);
    EXPECT_EQ(table.verify(0, bytes), -1);
    bytes.back() = std::byte{8};
    EXPECT_EQ(table.verify(0, bytes), 3);
    bytes[2 * aio::kPieceBytes - 1] = std::byte{8};
    EXPECT_EQ(table.verify(0, bytes), 1);
    table.seal(0, bytes);
    EXPECT_EQ(table.verify(0, bytes), -1);
    EXPECT_EQ(bodies_, GetParam() ? 6 * 4 : 0);
}

INSTANTIATE_TEST_SUITE_P(Threads, Checksums, testing::Bool(),
                         [](const auto& threads) { return threads.param ? "several" : "one"; });

}  // namespace
}  // namespace ferry::swap
