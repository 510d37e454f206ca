// The program's callbacks that this thread is within: what they may not call is refused at once,
// where it would wait for ever.
#pragma once

namespace ferry::capi {

// While it lives, this thread is in a callback of that object, whoever's thread it is.
class InCallback {
public:
    explicit InCallback(const void* object) noexcept;
    ~InCallback();
    InCallback(const InCallback&) = delete;
    InCallback& operator=(const InCallback&) = delete;

    static bool of(const void* object) noexcept;

private:
    const void* const object_;
    const InCallback* const around_;
};
// Stands for the callback of ferry_on_stuck(), of whose call nobody knows the engine.
const void* any_engine() noexcept;

}  // namespace ferry::capi
