#include "attached.h"

#include <hwloc.h>

#include <algorithm>
#include <filesystem>

namespace ferry::topology {
namespace {

namespace fs = std::filesystem;

constexpr int kDisplayClass = 0x03;  // of PCI

int node_of_object(hwloc_topology_t machine, hwloc_obj_t object) {
    const hwloc_obj_t holder = hwloc_get_non_io_ancestor_obj(machine, object);
    const bool one = holder && holder->nodeset && hwloc_bitmap_weight(holder->nodeset) == 1;
    return one ? hwloc_bitmap_first(holder->nodeset) : -1;
}

std::string address_of(const hwloc_obj_attr_u::hwloc_pcidev_attr_s& pci) {
    char text[32];
    snprintf(text, sizeof text, "%04x:%02x:%02x.%x", static_cast<unsigned>(pci.domain), pci.bus,
             pci.dev, pci.func);
    return text;
}

void collect(hwloc_topology_t machine, std::vector<Attached>& found) {
    hwloc_obj_t object = nullptr;
    while ((object = hwloc_get_next_pcidev(machine, object))) {
        const auto& pci = object->attr->pcidev;
        if (pci.class_id >> 8 == kDisplayClass)
            found.push_back({address_of(pci), true, node_of_object(machine, object)});
    }
    while ((object = hwloc_get_next_osdev(machine, object))) {
        if (object->attr->osdev.type == HWLOC_OBJ_OSDEV_BLOCK)
            found.push_back({object->name, false, node_of_object(machine, object)});
    }
}

void collect_drives(fs::path device, std::vector<std::string>& found) {
    std::error_code ignored;
    if (fs::exists(device / "partition", ignored)) device = device.parent_path();
    bool whole = true;
    for (const auto& part : fs::directory_iterator(device / "slaves", ignored)) {
        whole = false;
        collect_drives(fs::canonical(part.path(), ignored), found);
    }
    if (whole) found.push_back(device.filename());
}

}  // namespace

std::vector<Attached> find_attached() {
    std::vector<Attached> found;
    hwloc_topology_t machine = nullptr;
    if (hwloc_topology_init(&machine) != 0) return found;
    // They would open GPUs and displays to learn more than is asked. One that is not installed is
    // refused, which is as good.
    for (const char* name : {"opencl", "gl", "cuda", "nvml", "rsmi", "levelzero"})
        hwloc_topology_set_components(machine, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, name);
    hwloc_topology_set_io_types_filter(machine, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
    if (hwloc_topology_load(machine) == 0) collect(machine, found);
    hwloc_topology_destroy(machine);
    return found;
}

std::vector<std::string> drives_of(unsigned major, unsigned minor, const std::string& sys) {
    std::vector<std::string> found;
    const std::string number = std::to_string(major) + ":" + std::to_string(minor);
    std::error_code absent;
    const fs::path device = fs::canonical(fs::path(sys) / "dev/block" / number, absent);
    if (!absent) collect_drives(device, found);
    return found;
}

}  // namespace ferry::topology
