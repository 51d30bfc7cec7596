"""The only package that knows of processes and devices."""

from nearkin.distributed.devices import available_cpus as available_cpus
from nearkin.distributed.devices import choose_device as choose_device
from nearkin.distributed.devices import control_groups as control_groups
from nearkin.distributed.devices import device_name as device_name
from nearkin.distributed.devices import native_precision as native_precision
from nearkin.distributed.devices import own_cpus as own_cpus
from nearkin.distributed.launch import called as called
from nearkin.distributed.launch import company as company
from nearkin.distributed.launch import process_group as process_group
from nearkin.distributed.launch import together as together
from nearkin.distributed.place import is_first as is_first
from nearkin.distributed.place import num_processes as num_processes
from nearkin.distributed.ranks import agreed as agreed
from nearkin.distributed.ranks import averaged as averaged
from nearkin.distributed.ranks import from_first as from_first
from nearkin.distributed.ranks import gather as gather
from nearkin.distributed.ranks import mean_over_rows as mean_over_rows
from nearkin.distributed.ranks import part as part
from nearkin.distributed.ranks import share as share
from nearkin.distributed.ranks import shuffled as shuffled
from nearkin.distributed.ranks import world_size as world_size
from nearkin.distributed.ranks import wrap as wrap
