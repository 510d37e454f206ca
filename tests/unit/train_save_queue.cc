// Parts of a checkpoint between two threads: all come out, in their order, whatever the room.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "ferry/team.h"
#include "train/saving/save_queue.h"

namespace ferry::train {
namespace {

using Bytes = std::vector<std::byte>;
using Arrays = std::vector<Bytes>;
using Tensor = std::vector<Arrays>;  // parts

Bytes random_bytes(std::mt19937& random, size_t count) {
    Bytes bytes(count);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    return bytes;
}

std::vector<Tensor> random_tensors(uint32_t seed, size_t most_bytes) {
    std::mt19937 random(seed);
    std::vector<Tensor> tensors(1 + random() % 8);
    for (Tensor& tensor : tensors) {
        tensor.resize(1 + random() % 6);
        for (Arrays& arrays : tensor) {
            arrays.resize(1 + random() % 4);
            for (Bytes& array : arrays) array = random_bytes(random, random() % most_bytes + 1);
        }
    }
    return tensors;
}

void put(SaveQueue& queue, const std::vector<Tensor>& tensors) {
    for (const Tensor& tensor : tensors) {
        for (const Arrays& arrays : tensor) {
            Arrays overwritten = arrays;  // as training overwrites the state
            const std::vector<std::span<const std::byte>> spans(overwritten.begin(),
                                                                overwritten.end());
            queue.put(spans);
            for (Bytes& array : overwritten) std::ranges::fill(array, std::byte{0xee});
        }
        queue.end_tensor();
    }
}

std::vector<Tensor> take(SaveQueue& queue, size_t count) {
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < count; ++i) {
        Tensor& tensor = tensors.emplace_back();
        EXPECT_TRUE(queue.take_tensor([&](std::span<const std::span<const std::byte>> arrays) {
            Arrays& copies = tensor.emplace_back();
            for (const auto& array : arrays) copies.emplace_back(array.begin(), array.end());
        }));
    }
    return tensors;
}

TEST(SaveQueue, GivesWhatWasPutWhateverTheRoom) {
    Team team(2);
    for (uint32_t seed = 0; seed < 60; ++seed) {
        const size_t room_bytes = std::array<size_t, 5>{0, 17, 300, 4096, 1 << 20}[seed % 5];
        SCOPED_TRACE(testing::Message() << "seed " << seed << ", room " << room_bytes);
        const std::vector<Tensor> tensors = random_tensors(seed, 500);
        Bytes room(room_bytes);
        SaveQueue queue(room, team);
        std::vector<Tensor> taken;
        std::thread taker([&] { taken = take(queue, tensors.size()); });
        put(queue, tensors);
        taker.join();
        EXPECT_EQ(taken, tensors);
    }
}

TEST(SaveQueue, TakesAllBeforeAnyIsTakenWhereThereIsRoom) {
    Team team(2);
    const std::vector<Tensor> tensors = random_tensors(1, 3 << 20);  // larger than a copied part
    Bytes room(size_t{1} << 28);
    SaveQueue queue(room, team);
    put(queue, tensors);
    EXPECT_EQ(take(queue, tensors.size()), tensors);
}

TEST(SaveQueue, NoSideWaitsForOneThatClosed) {
    Team team(1);
    for (const size_t room_bytes : {size_t{0}, size_t{600}}) {
        Bytes room(room_bytes);
        SaveQueue queue(room, team);
        std::thread taker([&] {
            EXPECT_THROW((void)queue.take_tensor([](std::span<const std::span<const std::byte>>) {
                throw std::runtime_error("the disk is full");
            }),
                         std::runtime_error);
            queue.close();
        });
        put(queue, random_tensors(2, 500));  // would wait for ever
        taker.join();
        EXPECT_TRUE(queue.closed());
    }
    SaveQueue queue({}, team);
    std::thread taker([&] {
        EXPECT_FALSE(queue.take_tensor([](std::span<const std::span<const std::byte>>) {}));
    });
    queue.close();
    taker.join();
}

}  // namespace
}  // namespace ferry::train
