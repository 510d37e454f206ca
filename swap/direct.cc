#include "direct.h"

#include <algorithm>

namespace ferry::swap {

void Direct::begin_put(ObjectId object, std::span<std::byte> bytes) {
    if (table_.object(object).home != Tier::nvme) {
        copy(StreamKind::h2d, table_.current_address(object), bytes.data(), object);
        return;
    }
    table_.seal(object, bytes);
    auto slot = table_.slot_for_write(object);
    if (!slot) {  // those under way free theirs
        end_puts();
        slot = table_.slot_for_write(object);
    }
    FERRY_CHECK(slot.has_value(), "the plan has a fresh slot for one write at least");
    Put& put = puts_.emplace_back();
    put.object = object;
    put.operation = {
        .kind = aio::Kind::write, .slot = slot.value_or(aio::kNoSlot), .buffer = bytes};
    volume_->submit(put.operation);
}

void Direct::end_puts() {
    wait_for_puts();
    const auto failed = std::ranges::find_if(
        puts_, [](const Put& put) { return put.operation.state != aio::State::done; });
    if (failed != puts_.end()) throw aio::to_error(*volume_, failed->operation);
    for (const Put& put : puts_)
        if (table_.object(put.object).versioned) table_.commit(put.object);
    puts_.clear();
    polled_ = 0;
}

void Direct::get(ObjectId object, std::span<std::byte> bytes) {
    if (table_.object(object).home != Tier::nvme) {
        copy(StreamKind::d2h, bytes.data(), table_.current_address(object), object);
        wait_for_copies();
        return;
    }
    aio::Operation operation{
        .kind = aio::Kind::read, .slot = table_.current_slot(object), .buffer = bytes};
    volume_->submit(operation);
    while (volume_->poll() != &operation) executor_.wait(kForever);
    if (operation.state != aio::State::done) throw aio::to_error(*volume_, operation);
}

std::span<std::byte> Direct::in_host(ObjectId object) noexcept {
    const Object& known = table_.object(object);
    if (known.home != Tier::host) return {};
    return {table_.current_address(object), static_cast<size_t>(known.bytes)};
}

void Direct::wait_for_puts() {
    wait_for_copies();
    while (polled_ < puts_.size()) {
        if (volume_->poll())
            ++polled_;
        else
            executor_.wait(kForever);
    }
}

void Direct::copy(StreamKind kind, std::byte* destination, const std::byte* source,
                  ObjectId object) {
    Stream& stream = device_.stream(kind);
    stream.copy(destination, source, table_.object(object).bytes);
    stream.signal(copied_);
    ++copies_;
}

void Direct::wait_for_copies() {
    while (copied_.load(std::memory_order_acquire) < copies_) executor_.wait(kForever);
}

}  // namespace ferry::swap
