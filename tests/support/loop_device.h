// A block device backed by a file, and a mounted file system: both need the right to make them.
#pragma once

#include <fcntl.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace ferry {

class LoopDevice {
public:
    // `file` is created with this size, and removed by its owner. `block_bytes`: the device's
    // logical block; 0: as the kernel does it.
    LoopDevice(const std::string& file, int64_t bytes, int block_bytes = 0) {
        const int backing = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        const int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
        if (backing < 0 || ftruncate(backing, bytes) != 0 || control < 0)
            why_not_ = strerror(errno);
        for (int tries = 0; why_not_.empty() && name_.empty() && tries < 100; ++tries)
            attach(backing, ioctl(control, LOOP_CTL_GET_FREE));
        if (device_ >= 0 && block_bytes > 0) set_block(block_bytes);
        if (backing >= 0) close(backing);
        if (control >= 0) close(control);
    }
    ~LoopDevice() {
        if (device_ >= 0) ioctl(device_, LOOP_CLR_FD), close(device_);
    }
    LoopDevice(const LoopDevice&) = delete;
    LoopDevice& operator=(const LoopDevice&) = delete;

    const std::string& name() const { return name_; }        // "/dev/loop3"
    const std::string& why_not() const { return why_not_; }  // empty: it is there

private:
    void attach(int backing, int number) {
        const std::string name = "/dev/loop" + std::to_string(number);
        const int device = number < 0 ? -1 : open(name.c_str(), O_RDWR | O_CLOEXEC);
        if (device >= 0 && ioctl(device, LOOP_SET_FD, backing) == 0) {
            name_ = name;
            device_ = device;
            return;
        }
        if (errno != EBUSY) why_not_ = std::string("no loop device: ") + strerror(errno);
        if (device >= 0) close(device);  // another process was faster
    }

    // Only a device that nobody has open takes over its new block for what goes through the cache.
    void set_block(int bytes) {
        if (ioctl(device_, LOOP_SET_BLOCK_SIZE, bytes) != 0)
            why_not_ = std::string("no loop device of such blocks: ") + strerror(errno);
        close(device_);
        device_ = open(name_.c_str(), O_RDWR | O_CLOEXEC);
    }

    std::string name_, why_not_;
    int device_ = -1;
};

class Mounted {
public:
    Mounted(const std::string& source, const std::string& where, const char* type,
            const char* options)
        : where_(where) {
        if (mount(source.c_str(), where.c_str(), type, 0, options) != 0)
            why_not_ = std::string("cannot mount ") + type + ": " + strerror(errno);
    }
    ~Mounted() {
        if (why_not_.empty()) umount2(where_.c_str(), MNT_DETACH);
    }
    Mounted(const Mounted&) = delete;
    Mounted& operator=(const Mounted&) = delete;

    const std::string& why_not() const { return why_not_; }

private:
    std::string where_, why_not_;
};

}  // namespace ferry
