#include "direct.h"

namespace ferry::swap {

Direct::~Direct() {
    for (const Put& put : puts_) wait_for(put);
}

void Direct::begin_put(ObjectId object, std::span<std::byte> bytes) {
    if (table_.object(object).home != Tier::nvme) {
        copy(StreamKind::h2d, table_.current_address(object), bytes.data(), object);
        Put& put = puts_.emplace_back();
        put.copy = copies_;
        return;
    }
    table_.seal(object, bytes);
    auto operation = table_.write_from(object, bytes);
    if (!operation) {  // those under way free their slots
        end_puts(0);
        operation = table_.write_from(object, bytes);
    }
    FERRY_CHECK(operation.has_value(), "the plan has a fresh slot for one write at least");
    Put& put = puts_.emplace_back();
    static_cast<aio::Operation&>(put) = operation.value_or(aio::Operation{});
    put.object = object;
    volume_->submit(put);
}

void Direct::end_puts(int64_t under_way) {
    for (; std::ssize(puts_) > under_way; puts_.pop_front()) {
        const Put& put = puts_.front();
        wait_for(put);
        if (put.copy > 0) continue;
        if (put.state != aio::State::done) throw TransferFailed(table_.to_error(put.object, put));
        if (table_.object(put.object).versioned) table_.commit(put.object);
    }
}

void Direct::get(ObjectId object, std::span<std::byte> bytes) {
    if (table_.object(object).home != Tier::nvme) {
        copy(StreamKind::d2h, bytes.data(), table_.current_address(object), object);
        wait_for_copies();
        return;
    }
    aio::Operation operation = table_.read_into(object, bytes);
    volume_->submit(operation);
    while (volume_->poll() != &operation) executor_.wait(kForever);
    if (operation.state != aio::State::done)
        throw TransferFailed(table_.to_error(object, operation));
}

std::span<std::byte> Direct::in_host(ObjectId object) noexcept {
    const Object& known = table_.object(object);
    if (known.home != Tier::host) return {};
    return {table_.current_address(object), static_cast<size_t>(known.bytes)};
}

bool Direct::finished(const Put& put) const noexcept {
    return put.copy > 0 ? copied_.load(std::memory_order_acquire) >= put.copy : put.polled;
}

void Direct::wait_for(const Put& put) {
    while (!finished(put)) {
        if (aio::Operation* other = volume_ ? volume_->poll() : nullptr)
            static_cast<Put*>(other)->polled = true;
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
